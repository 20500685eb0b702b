"""Does the comparison with a store find a package that is another model, whoever wrote it?"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from export.hf_export import export_package
from export.hf_plan import ExportRequest
from export.package_memory import available_bytes
from export.package_weights import open_weights
from export.verify import BOUNDS, VerificationError, compare, load_afresh
from export.verify_against import compare_folder
from tests.support.exports import (
    byte_tokenizer,
    interleaved_rotary,
    load_here,
    make_store,
    rewrite_tensors,
)
from tests.support.tiny_model import TINY
from trainer.errors import InputError

MODEL = replace(TINY, vocab_size=300, pad_token_id=0, bos_token_id=0, eos_token_id=0)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_is_a_package_of_another_model_found(dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="pip install '.[test]'")
    store = make_store(tmp_path / "store", MODEL, steps=2, tokenizer=byte_tokenizer(300))
    folder = tmp_path / "package"
    export_package(ExportRequest(store=str(store), out=folder, dtype=dtype), load_here)
    with open_weights(str(store), ref=None) as weights:
        verdict, loaded = compare_folder(folder, weights, load_here)
        assert verdict.bit_equal
        assert verdict.holds
        assert verdict.positions == 64
        assert (list(loaded.faults), list(loaded.disagreements)) == ([], [])
    with open_weights(str(store), ref="step-0") as older:
        assert not compare_folder(folder, older, load_here)[0].holds
    rewrite_tensors(folder / "model.safetensors", interleaved_rotary(MODEL.head_dim))
    with open_weights(str(store), ref=None) as weights:
        verdict, loaded = compare_folder(folder, weights, load_here)
        assert list(loaded.faults) == []  # it loads like any other
        assert not verdict.holds


def test_is_a_difference_measured_against_the_dtypes_bound() -> None:
    ours_TV = torch.linspace(-20, 20, 64 * 10).reshape(64, 10)
    for dtype, bound in BOUNDS.items():
        within = compare(ours_TV, ours_TV + 0.9 * bound * 20, dtype)
        assert within.holds
        assert not within.bit_equal
        assert not compare(ours_TV, ours_TV + 1.1 * bound * 20, dtype).holds
    assert compare(ours_TV, ours_TV, "float32").bit_equal
    broken = ours_TV.clone()
    broken[63, 9] = torch.nan
    assert not compare(ours_TV, broken, "bfloat16").holds
    with pytest.raises(VerificationError, match="gives logits"):
        compare(ours_TV, ours_TV[:, :9], "float32")


def test_is_a_package_that_cannot_be_loaded_told_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(VerificationError, match=r"cannot load the package \(exit code 1\)"):
        load_afresh(tmp_path, torch.arange(4), "stages", {"model": {}, "tensors": []})


@pytest.mark.parametrize("text", ["[", '{"dtype": "int4"}'])
def test_is_a_configuration_without_a_dtype_refused(text: str, tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", MODEL)
    (tmp_path / "config.json").write_text(text)
    with (
        open_weights(str(store), ref=None) as weights,
        pytest.raises(InputError, match=r"config\.json"),
    ):
        compare_folder(tmp_path, weights, load_here)


def test_is_memory_read_from_the_system() -> None:
    # A process of its own: here an earlier test may have had its peak higher up.
    code = (
        "import torch; from export.package_memory import peak_bytes; before = peak_bytes();"
        " held = torch.ones(1 << 24); print(peak_bytes() - before)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert int(ended.stdout) > 40 << 20
    assert available_bytes() > 1 << 24
