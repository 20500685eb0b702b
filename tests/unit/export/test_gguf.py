"""Is a GGUF file the store's model: layout, values, settings, tokenizer?"""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from export import gguf_file, gguf_layout
from export.gguf_export import GgufReport, GgufRequest, export_gguf
from export.gguf_layout import gguf_tensors, halved, interleaved, rope_factors
from export.gguf_tokenizer import BYTE, CONTROL, UNUSED, gguf_tokenizer
from export.hf_config import SpecialIds
from export.package_tokenizer import PackageTokenizer, tokenizer_of_folder
from export.verify import VerificationError
from tests.support.exports import byte_tokenizer, make_store, params_of
from tests.support.tiny_model import TINY
from trainer.errors import InputError
from trainer.model import layers
from trainer.model.config import ModelConfig

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install '.[test]'")

BASE = replace(TINY, vocab_size=300, pad_token_id=0, bos_token_id=0, eos_token_id=0)
BIASED = replace(BASE, attention_bias=True, head_dim=12)


@pytest.fixture(scope="module")
def tokenizer() -> bytes:
    """Give a byte-level tokenizer of the models' vocabulary."""
    return byte_tokenizer(BASE.vocab_size)


def exported(store: Path, form: str, **more: object) -> GgufReport:
    request = GgufRequest(store=str(store), out=store.parent / f"{form}.gguf", form=form)
    return export_gguf(replace(request, **more))  # type: ignore[arg-type]


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Read every tensor of a file as fp32, in the shape that torch has."""
    return {
        tensor.name: torch.from_numpy(gguf.dequantize(tensor.data.copy(), tensor.tensor_type))
        for tensor in gguf.GGUFReader(path).tensors
    }


def neighbours_turned(x_HTK: Tensor, theta: float) -> Tensor:
    """Turn pairs (2i, 2i + 1) by position times theta^(-2i/K), as llama.cpp does for `llama`."""
    width = x_HTK.shape[-1]
    angles = torch.arange(x_HTK.shape[1])[:, None] * theta ** (-torch.arange(0, width, 2) / width)
    even, odd = x_HTK[..., ::2], x_HTK[..., 1::2]
    turned = (even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos())
    return torch.stack(turned, dim=-1).flatten(-2)


def test_do_rows_laid_out_anew_attend_alike() -> None:
    heads, width, positions = 4, 16, 20
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(heads * width, 48, generator=generator) for _ in "qk"]
    x_TD = torch.randn(positions, 48, generator=generator)

    def heads_of(weight: Tensor) -> Tensor:
        return (x_TD @ weight.T).view(positions, heads, width).transpose(0, 1)

    cos, sin = layers.rotary_angles(positions, width, 1e4, torch.float32, torch.device("cpu"))
    ours = [layers.rotate(heads_of(weight), cos, sin) for weight in weights]
    theirs = [neighbours_turned(heads_of(interleaved(w, heads)), 1e4) for w in weights]
    torch.testing.assert_close(ours[0] @ ours[1].mT, theirs[0] @ theirs[1].mT, rtol=1e-4, atol=1e-3)
    as_stored = [neighbours_turned(heads_of(weight), 1e4) for weight in weights]
    far = (ours[0] @ ours[1].mT - as_stored[0] @ as_stored[1].mT).abs().max()
    assert far > 1  # control: rows left as they are attend otherwise
    assert torch.equal(halved(interleaved(weights[0], heads), heads), weights[0])


@pytest.mark.parametrize("form", gguf_layout.TYPES)
def test_does_the_file_hold_the_stores_weights(form: str, tokenizer: bytes, tmp_path: Path) -> None:
    model = replace(BASE, attention_bias=True, attention_output_bias=True, hidden_size=64)
    store = make_store(tmp_path / "store", model, tokenizer=tokenizer)
    assert exported(store, form).architecture == "llama"
    found, params = tensors_of(tmp_path / f"{form}.gguf"), params_of(store)
    assert len(found) == sum(map(len, params.values()))
    stored = params["params/block_001"]["self_attn.k_proj.weight"]
    theirs = halved(found["blk.1.attn_k.weight"], model.num_kv_heads)
    bound = {"f32": 0.0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 2**-7}[form]
    assert float((theirs - stored).abs().max()) <= bound * float(stored.abs().max())
    bias = params["params/block_001"]["self_attn.q_proj.bias"]
    assert torch.equal(halved(found["blk.1.attn_q.bias"], model.num_heads), bias)
    assert torch.equal(found["blk.2.ffn_norm.weight"], params["params/block_002"][
        "post_attention_layernorm.weight"])  # fmt: skip


def test_control_swapped_rotary_rows_are_noticed(
    tokenizer: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "store", BASE, tokenizer=tokenizer)
    monkeypatch.setattr(gguf_file, "interleaved", lambda values, _: values)
    with pytest.raises(VerificationError, match=r"attn_q\.weight is not params/block_000"):
        exported(store, "f16")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_is_a_file_of_another_commit_noticed(tokenizer: bytes, tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", BASE, steps=2, tokenizer=tokenizer)
    exported(store, "f32", ref="step-0")
    tensors, newest = gguf_tensors(BASE, "f32"), params_of(store)
    with pytest.raises(VerificationError, match="token_embd"):
        gguf_file.check_file(tmp_path / "f32.gguf", tensors, lambda shard: newest[shard])


@pytest.mark.parametrize(
    ("model", "architecture"),
    [
        (BASE, "llama"),
        (replace(BASE, tied_embeddings=True), "llama"),
        (BIASED, "qwen2"),
        (replace(BIASED, head_dim=16), "llama"),  # qwen2 wants heads * width = hidden size
        (replace(BASE, qk_norm=True), "qwen3"),
    ],
)
def test_are_the_settings_those_of_the_model(
    model: ModelConfig, architecture: str, tokenizer: bytes, tmp_path: Path
) -> None:
    store = make_store(tmp_path / "store", model, tokenizer=tokenizer)
    assert exported(store, "f16").architecture == architecture
    fields = {
        name: field.contents()
        for name, field in gguf.GGUFReader(tmp_path / "f16.gguf").fields.items()
    }
    assert fields["general.architecture"] == architecture
    assert fields[f"{architecture}.attention.head_count_kv"] == 2
    assert fields[f"{architecture}.attention.key_length"] == model.head_dim
    assert fields[f"{architecture}.rope.freq_base"] == 10000.0
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    assert fields["tokenizer.ggml.eos_token_id"] == 0
    assert fields["shardb.step"] == 0
    names = {tensor.name for tensor in gguf.GGUFReader(tmp_path / "f16.gguf").tensors}
    assert ("output.weight" in names) is not model.tied_embeddings


@pytest.mark.parametrize(
    "model",
    [
        replace(BASE, qk_norm=True, attention_bias=True),
        replace(BASE, qk_norm=True, rope_scaling_type="llama3", rope_scaling_factor=8.0,
                rope_scaling_original_max_position_embeddings=32),
    ],
)  # fmt: skip
def test_is_a_geometry_without_architecture_refused(model: ModelConfig, tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", model, tokenizer=byte_tokenizer(300))
    with pytest.raises(InputError, match="no architecture"):
        exported(store, "f16")


def test_do_llama3s_factors_stretch_like_the_stages() -> None:
    model = replace(
        *(BASE,),
        head_dim=32,
        rope_theta=500000.0,
        rope_scaling_type="llama3",
        rope_scaling_factor=8.0,
        rope_scaling_original_max_position_embeddings=64,
    )
    scaling = model.rope_scaling
    assert scaling is not None
    plain = 1.0 / (model.rope_theta ** (torch.arange(0, 32, 2).float() / 32))
    factors = rope_factors(model, scaling)
    torch.testing.assert_close(plain / factors, layers.stretched(plain, scaling))
    assert len(set(factors.tolist())) >= 3
    assert math.isclose(float(factors.max()), 8.0)


def packaged(document: dict[str, object], size: int) -> PackageTokenizer:
    data = json.dumps(document).encode()
    special = SpecialIds(bos=None, eos=None, pad=None)
    return PackageTokenizer(files={"tokenizer.json": data}, special=special, size=size)


@pytest.mark.parametrize(
    ("folder", "pre", "model", "adds_bos"),
    [
        ("tokenizers/gpt2-50257", "gpt-2", "gpt2", False),
        ("tokenizers/smollm2-49152", "smollm", "gpt2", False),
        ("tokenizers/mistral-32000", "default", "llama", True),
        ("models/stories260K", "default", "llama", True),
    ],
)
def test_are_real_tokenizers_recognised(
    shared_data: Path, folder: str, pre: str, model: str, adds_bos: bool
) -> None:
    found = tokenizer_of_folder(shared_data / folder, BASE)
    made = gguf_tokenizer(found, found.size + 2)
    assert (made.pre, made.model, made.adds_bos) == (pre, model, adds_bos)
    assert len(made.tokens) == len(made.types) == found.size + 2
    assert made.types[-1] == UNUSED
    assert CONTROL in made.types
    assert (BYTE in made.types) is (model == "llama")
    assert bool(made.scores) is (model == "llama")


def test_is_an_unknown_way_of_cutting_refused(tokenizer: bytes) -> None:
    document = json.loads(tokenizer)
    document["pre_tokenizer"] = {"type": "Whitespace"}
    with pytest.raises(InputError, match="--pre"):
        gguf_tokenizer(packaged(document, 300), 300)
    assert gguf_tokenizer(packaged(document, 300), 300, "llama-bpe").pre == "llama-bpe"


def test_is_a_store_without_a_tokenizer_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", BASE)
    with pytest.raises(InputError, match="--tokenizer"):
        exported(store, "f16")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


@pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama_cpp is not installed"
)
@pytest.mark.parametrize("form", gguf_layout.TYPES)
def test_does_llama_cpp_give_the_stores_logits(form: str, tokenizer: bytes, tmp_path: Path) -> None:
    report = exported(make_store(tmp_path / "store", BASE, tokenizer=tokenizer), form)
    assert report.check is not None
    assert report.check.positions >= 64
