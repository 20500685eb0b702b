"""Does a package that was imported and exported again have its tensors byte for byte?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from export.hf_export import export_package
from export.hf_plan import ExportRequest
from tests.support.exports import load_here
from tests.support.packages import (
    FAMILY_NAMES,
    Tensors,
    config_of,
    import_here,
    random_tensors,
    write_package,
)
from tests.support.training import make_data, train_here


def exported(store: Path, out: Path, **how: Any) -> Tensors:
    export_package(ExportRequest(store=str(store), out=out, **how), load_here)
    found: Tensors = {}
    for path in sorted(out.glob("*.safetensors")):
        found |= load_file(path)
    return found


def check_equal(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_is_every_family_given_back(name: str, tmp_path: Path) -> None:
    tensors = random_tensors(config_of(name))
    import_here(write_package(tmp_path / "p", config_of(name), tensors, split=True), tmp_path / "s")
    check_equal(exported(tmp_path / "s", tmp_path / "out"), tensors)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == name
    # What was exported is a package like any other.
    import_here(tmp_path / "out", tmp_path / "s", branch="again")
    check_equal(exported(tmp_path / "s", tmp_path / "out2", ref="again"), tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_is_every_form_given_back(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = random_tensors(config_of("llama"), dtype=dtype)
    import_here(write_package(tmp_path / "p", config_of("llama"), tensors), tmp_path / "s")
    check_equal(exported(tmp_path / "s", tmp_path / "out"), tensors)


def test_are_masters_that_were_not_trained_rounded_back_exactly(tmp_path: Path) -> None:
    """A step at a rate that changes no bf16 value gives the imported bytes back."""
    tensors = random_tensors(config_of("llama"))
    import_here(write_package(tmp_path / "p", config_of("llama"), tensors), tmp_path / "s")
    data = make_data(tmp_path / "data")
    flags = ["--store", str(tmp_path / "s"), "--data-dir", str(data / "train"), "--device", "cpu"]
    rate = ["--learning-rate", "1e-12", "--weight-decay", "0", "--max-steps", "1"]
    assert train_here([*flags, *rate, "--threads", "1"]) == 0
    check_equal(exported(tmp_path / "s", tmp_path / "out", dtype="bf16"), tensors)


def test_would_a_changed_value_be_noticed(tmp_path: Path) -> None:
    tensors = random_tensors(config_of("llama"))
    import_here(write_package(tmp_path / "p", config_of("llama"), tensors), tmp_path / "s")
    tensors["model.norm.weight"].view(torch.int16)[3] ^= 1
    with pytest.raises(AssertionError):
        check_equal(exported(tmp_path / "s", tmp_path / "out"), tensors)
