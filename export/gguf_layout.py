"""A model as a GGUF file lays it out: architecture, settings, tensor names and their forms.

Owns the mapping to llama.cpp's architectures. Knows nothing of tokenizers or files.

llama.cpp turns the pairs (2i, 2i + 1) of a head for `llama`, and (i, i + K/2) for `qwen2` and
`qwen3`; the stages here turn (i, i + K/2). So for `llama`, and for it alone, the rows of queries
and keys, and their biases, are laid out anew: `interleaved`, undone by `halved`.

Sources: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and the
tensor names of the `gguf` package.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from trainer.errors import InputError
from trainer.model.config import ModelConfig
from trainer.model.rope_scaling import RopeScaling
from trainer.model.stages import build_stages

TYPES = ("f32", "f16", "bf16", "q8_0")
Q8_BLOCK = 32
_STAGE_NAMES = {
    "embeddings": "token_embd", "final_norm": "output_norm", "lm_head": "output",
}  # fmt: skip
_BLOCK_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTensor:
    """One tensor of the file.

    heads: where the rows are laid out anew, over how many heads; 0 where they stay.
    """

    name: str
    shard: str
    tensor: str
    shape: tuple[int, ...]
    form: str
    heads: int = 0


def architecture_of(model: ModelConfig) -> str:
    """Name the architecture of llama.cpp that computes a geometry; InputError where none does.

    `llama` takes any set of biases; `qwen2` wants heads that share the hidden size evenly.
    """
    is_llama3 = model.rope_scaling_type == "llama3"
    if model.qk_norm:
        if model.attention_bias or model.attention_output_bias or is_llama3:
            raise InputError(
                "llama.cpp has no architecture with norms of queries and keys beside biases or"
                " llama3's rotary scaling: export with export-hf"
            )
        return "qwen3"
    only_qkv = model.attention_bias and not model.attention_output_bias
    if only_qkv and model.query_size == model.hidden_size and not is_llama3:
        return "qwen2"
    return "llama"


def gguf_tensors(model: ModelConfig, form: str) -> list[GgufTensor]:
    """List the tensors in the order of the stages; `form` is one of TYPES."""
    rotated = {"attn_q": model.num_heads, "attn_k": model.num_kv_heads}
    architecture = architecture_of(model)
    found = []
    for stage in build_stages(model):
        for name, parameter in stage.parameters.items():
            short, _, kind = _gguf_name(stage.name, name).rpartition(".")
            letter = short.rpartition(".")[2]
            found.append(
                GgufTensor(
                    name=f"{short}.{kind}",
                    shard=f"params/{stage.name}",
                    tensor=name,
                    shape=parameter.shape,
                    form=_form(parameter.shape, form),
                    heads=rotated.get(letter, 0) if architecture == "llama" else 0,
                )
            )
    return found


def interleaved(values: Tensor, heads: int) -> Tensor:
    """Bring row i and row i + K/2 of each head beside each other: [heads * K, ...] likewise."""
    if not heads:
        return values
    return values.view(heads, 2, -1, *values.shape[1:]).transpose(1, 2).reshape(values.shape)


def halved(values: Tensor, heads: int) -> Tensor:
    """Undo `interleaved`."""
    if not heads:
        return values
    return values.view(heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)


def rope_factors(model: ModelConfig, scaling: RopeScaling) -> Tensor:
    """Give what llama.cpp divides each rotary frequency by for llama3's scaling, fp32 [K/2]."""
    assert scaling.kind == "llama3", "linear scaling is one number"
    low_wave = scaling.original_max_position_embeddings / scaling.low_freq_factor
    high_wave = scaling.original_max_position_embeddings / scaling.high_freq_factor
    factors = []
    for index in range(0, model.head_dim, 2):
        wave = 2 * math.pi * model.rope_theta ** (index / model.head_dim)
        if wave < high_wave:
            factors.append(1.0)
        elif wave > low_wave:
            factors.append(scaling.factor)
        else:
            spread = scaling.high_freq_factor - scaling.low_freq_factor
            kept = scaling.original_max_position_embeddings / wave - scaling.low_freq_factor
            smooth = kept / spread
            factors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return torch.tensor(factors, dtype=torch.float32)


def _gguf_name(stage: str, tensor: str) -> str:
    base, _, kind = tensor.rpartition(".")
    if not stage.startswith("block_"):
        return f"{_STAGE_NAMES[stage]}.{kind}"
    return f"blk.{int(stage.removeprefix('block_'))}.{_BLOCK_NAMES[base]}.{kind}"


def _form(shape: tuple[int, ...], form: str) -> str:
    """Norms and biases stay f32; rows that do not fill q8_0's blocks are f16."""
    if len(shape) == 1:
        return "f32"
    return "f16" if form == "q8_0" and shape[-1] % Q8_BLOCK else form
