"""Is an exported adapter known for what it is: by the doctor, and by its base's name?"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from export.doctor_run import Against, examine
from export.peft_export import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from shardb.errors import NotFoundError
from tests.support.adapters import imported_store
from tests.support.export_commands import run_here
from tests.support.packages import change_json
from tests.support.training import make_data, train_here
from trainer.errors import InputError

Spoil = Callable[[Path], None]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Give a package, and a store with one step of adapters beside it."""
    root = tmp_path_factory.mktemp("run")
    package, store = imported_store(root, "llama")
    flags = ["--store", str(store), "--data-dir", str(make_data(root / "data") / "train")]
    flags += ["--device", "cpu", "--threads", "1", "--lora-rank", "2", "--max-steps", "1"]
    assert train_here(flags) == 0
    return package, store


@pytest.fixture
def adapter(trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    out = tmp_path / "adapter"
    assert run_here(capsys, "hf", trained[1], "--adapter", "--out", out).code == 0
    return out


def test_the_doctor_takes_an_adapter_for_one(
    adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_here(capsys, "doctor", adapter)
    assert found.code == 0, found.out
    assert "this is an adapter (LORA, rank 2), no whole model" in found.out
    assert "remove" not in found.out
    assert "error" not in found.out
    examined = examine(adapter)
    tensors = load_file(adapter / ADAPTER_WEIGHTS)
    assert (examined.kind, examined.tensors) == ("adapter", len(tensors))
    assert examined.values_read == sum(tensor.numel() for tensor in tensors.values())


def test_an_adapter_is_compared_with_nothing(adapter: Path, trained: tuple[Path, Path]) -> None:
    with pytest.raises(InputError, match="--merge"):
        examine(adapter, Against(store=str(trained[1]), ref=None))


def test_a_model_beside_an_adapters_settings_is_looked_at_as_a_model(
    trained: tuple[Path, Path], adapter: Path, tmp_path: Path
) -> None:
    both = tmp_path / "both"
    shutil.copytree(trained[0], both)
    shutil.copy(adapter / ADAPTER_CONFIG, both)
    assert examine(both).kind == "folder"


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Spoil:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / ADAPTER_WEIGHTS)
        change(tensors)
        save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})

    return spoil


def zeroed(tensors: dict[str, torch.Tensor]) -> None:
    tensors |= {n: torch.zeros_like(t) for n, t in tensors.items() if "lora_B" in n}


def settings(**changes: object) -> Spoil:
    return lambda folder: change_json(folder / ADAPTER_CONFIG, lambda v: v.update(changes))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (weights(lambda t: t.pop(next(n for n in t if "lora_B" in n))), "one half of an adapter"),
        (weights(zeroed), "every lora_B is zero"),
        (weights(lambda t: t[next(iter(t))].fill_(torch.nan)), "NaN"),
        (settings(r=8), r"and r is 8: peft refuses it"),
        (settings(r=None), "no rank"),
        (settings(target_modules=["q_proj"]), r"peft has no place for .*v_proj"),
        (settings(target_modules=["q_proj", "v_proj", "o_proj"]), "no tensor is of o_proj"),
        (settings(peft_type="VERA"), "it is 'VERA'"),
        (lambda folder: (folder / ADAPTER_CONFIG).write_text("{"), "no valid JSON"),
        (lambda folder: (folder / ADAPTER_WEIGHTS).write_bytes(b"x" * 64), "fetch the"),
        (
            lambda folder: (folder / ADAPTER_WEIGHTS).rename(folder / "other.safetensors"),
            "adapter_model.safetensors: it is not there",
        ),
    ],
)
def test_what_is_wrong_with_an_adapter_is_found(
    spoil: Spoil, words: str, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(adapter)
    found = run_here(capsys, "doctor", adapter)
    assert found.code == 1
    assert re.search(words, found.out), found.out


def test_the_base_is_named_when_asked(
    trained: tuple[Path, Path], adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "it names no base" in run_here(capsys, "doctor", adapter).out
    asked = (trained[1], "--adapter", "--out", tmp_path / "named", "--base-model")
    assert run_here(capsys, "hf", *asked, "meta/model").code == 0
    config = json.loads((tmp_path / "named" / ADAPTER_CONFIG).read_text())
    assert config["base_model_name_or_path"] == "meta/model"
    assert "names no base" not in run_here(capsys, "doctor", tmp_path / "named").out
    empty = run_here(capsys, "hf", *asked, "", "--overwrite")
    assert (empty.code, "--base-model is empty" in empty.err) == (2, True)
    alone = run_here(
        capsys, "hf", trained[1], "--merge", "--out", tmp_path / "m", "--base-model", "x"
    )
    assert (alone.code, "give --adapter" in alone.err) == (2, True)


@pytest.mark.parametrize("more", [("--adapter",), ("--merge",), ()])
def test_a_store_that_is_not_there_is_not_to_be_made(
    more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_here(capsys, "hf", tmp_path / "none", *more, "--out", tmp_path / "out")
    assert found.code == NotFoundError.exit_code
    assert f"{tmp_path / 'none'}: there is no store here: give the one" in found.err
    assert "shardb init" not in found.err
    assert not list(tmp_path.iterdir())


AUTO_SCRIPT = """
import sys
from peft import AutoPeftModelForCausalLM
model = AutoPeftModelForCausalLM.from_pretrained(sys.argv[1])
print(sum("lora_A" in name for name, _ in model.named_parameters()))
"""


def test_pefts_auto_class_finds_a_base_that_is_named(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft", reason="the extra `peft` is not installed")
    package, store = trained
    out = tmp_path / "named"
    asked = (store, "--adapter", "--out", out, "--base-model", package)
    assert run_here(capsys, "hf", *asked).code == 0
    script = [sys.executable, "-c", AUTO_SCRIPT, str(out)]
    told = subprocess.run(script, check=True, capture_output=True, text=True).stdout
    wanted = sum("lora_A" in name for name in load_file(out / ADAPTER_WEIGHTS))
    assert int(told.split()[-1]) == wanted > 0
