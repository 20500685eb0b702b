"""Does transformers compute the store's logits, bit for bit, from the package of any geometry?"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from export.hf_export import ExportReport, export_package
from export.hf_plan import ExportRequest
from export.verify import Loaded, VerificationError
from tests.support.exports import (
    byte_tokenizer,
    interleaved_rotary,
    load_here,
    make_store,
    rewrite_tensors,
)
from tests.support.tiny_model import TINY
from trainer.model.config import ModelConfig

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[test]'")

BASE = replace(
    TINY, vocab_size=300, max_position_embeddings=96, pad_token_id=0, bos_token_id=0, eos_token_id=0
)
LLAMA3 = replace(
    BASE,
    rope_theta=500000.0,
    rope_scaling_type="llama3",
    rope_scaling_factor=8.0,
    rope_scaling_original_max_position_embeddings=32,
)
GEOMETRIES: dict[str, tuple[str, ModelConfig]] = {
    "llama": ("llama", BASE),
    "tied": ("llama", replace(BASE, tied_embeddings=True)),
    "all-biases": ("llama", replace(BASE, attention_bias=True, attention_output_bias=True)),
    "output-bias": ("llama", replace(BASE, attention_output_bias=True)),
    "qkv-biases": ("llama", replace(BASE, attention_bias=True, rms_norm_eps=1e-6)),
    "qwen3": ("qwen3", replace(BASE, head_dim=32, qk_norm=True, rope_theta=1e6)),
    "qwen3-biases": ("qwen3", replace(BASE, qk_norm=True, attention_bias=True)),
    "llama3": ("llama", LLAMA3),
    "linear": ("llama", replace(BASE, rope_scaling_type="linear", rope_scaling_factor=4.0)),
}


@pytest.fixture(scope="module")
def tokenizer() -> bytes:
    """Give a byte-level tokenizer of the models' vocabulary."""
    return byte_tokenizer(BASE.vocab_size)


def exported(store: Path, dtype: str) -> ExportReport:
    request = ExportRequest(store=str(store), out=store.parent / dtype, dtype=dtype)
    return export_package(request, load_here)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_are_the_logits_bit_equal(name: str, tokenizer: bytes, tmp_path: Path) -> None:
    family, model = GEOMETRIES[name]
    store = make_store(tmp_path / "store", model, tokenizer=tokenizer)
    for dtype, precise in (("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")):
        check = exported(store, dtype).check
        assert (check.loader, check.dtype) == ("transformers", precise)
        assert check.positions == 96 >= 64
        assert check.bit_equal
        assert check.disagreements == ()
    assert json.loads((tmp_path / "fp32" / "config.json").read_text())["model_type"] == family


def test_is_it_qwen2_without_a_tokenizer(tmp_path: Path) -> None:
    model = replace(BASE, attention_bias=True)
    store = make_store(tmp_path / "store", model)
    assert exported(store, "fp32").check.bit_equal
    config = json.loads((tmp_path / "fp32" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]


def one_bias_changed(name: str, values: torch.Tensor) -> torch.Tensor:
    return values + 0.1 * (name == "model.layers.2.self_attn.o_proj.bias")


@pytest.mark.parametrize("change", [interleaved_rotary(BASE.head_dim), one_bias_changed])
def test_control_another_model_is_noticed_and_not_published(
    change: Callable[[str, torch.Tensor], torch.Tensor], tokenizer: bytes, tmp_path: Path
) -> None:
    model = replace(BASE, attention_bias=True, attention_output_bias=True)
    store = make_store(tmp_path / "store", model, tokenizer=tokenizer)

    def load_changed(folder: Path, *more: Any) -> Loaded:
        rewrite_tensors(folder / "model.safetensors", change)
        return load_here(folder, *more)

    request = ExportRequest(store=str(store), out=tmp_path / "package")
    with pytest.raises(VerificationError, match="another model"):
        export_package(request, load_changed)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_control_a_tensor_nobody_asked_for_is_a_fault(tokenizer: bytes, tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", BASE, tokenizer=tokenizer)

    def load_shallower(folder: Path, *more: Any) -> Loaded:
        config = json.loads((folder / "config.json").read_text())
        config["num_hidden_layers"] -= 1
        (folder / "config.json").write_text(json.dumps(config))
        return load_here(folder, *more)

    request = ExportRequest(store=str(store), out=tmp_path / "package")
    with pytest.raises(VerificationError, match="unexpected_keys"):
        export_package(request, load_shallower)
