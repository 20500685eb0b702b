"""`config.json` and `generation_config.json`, as transformers 4 and 5 and vLLM read them.

Owns which published family a geometry is, and the doubled forms: `rope_theta` beside
`rope_parameters`, `torch_dtype` beside `dtype`. Every derived value is written out, because readers
derive differently. Knows nothing of tokenizers or files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from trainer.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialIds:
    """The ids that begin, end and fill up texts; None where the tokenizer has no such token."""

    bos: int | None
    eos: int | None
    pad: int | None

    def to_json(self) -> dict[str, int | None]:
        """Give them by the names of the configuration; None is said, for readers have defaults."""
        return {"bos_token_id": self.bos, "eos_token_id": self.eos, "pad_token_id": self.pad}


_ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
)


def family_name(model: ModelConfig, *, as_qwen2: bool) -> str:
    """Name the family, as `model_type`, that computes a geometry.

    `as_qwen2`: whether a model with biases on queries, keys and values alone may be called Qwen2.
    Llama computes it too, with biases of 0 for what has none; and version 5 of transformers loads
    beside a Qwen2 no tokenizer but Qwen2's own, whatever the package says.
    """
    if model.qk_norm:
        return "qwen3"
    only_qkv = model.attention_bias and not model.attention_output_bias
    return "qwen2" if only_qkv and as_qwen2 else "llama"


def missing_biases(model: ModelConfig, family: str) -> str:
    """Give the letters of the projections that the family gives a bias and the model does not."""
    if family == "qwen2" or not (model.attention_bias or model.attention_output_bias):
        return ""
    return "qkv" * (not model.attention_bias) + "o" * (not model.attention_output_bias)


def build_config(
    model: ModelConfig, family: str, special: SpecialIds, dtype: str
) -> dict[str, Any]:
    """Give the content of `config.json`; `dtype` is torch's name of the weights' form."""
    values: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.rms_norm_eps,
        "initializer_range": model.initializer_range,
        "attention_dropout": 0.0,
        "tie_word_embeddings": model.tied_embeddings,
        "use_cache": True,
        **_rotary(model),
        **special.to_json(),
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    if family != "qwen2":
        values["attention_bias"] = model.attention_bias or model.attention_output_bias
    if family == "llama":
        values |= {"mlp_bias": False, "pretraining_tp": 1}
    else:
        values |= {"use_sliding_window": False, "sliding_window": None}
        values["max_window_layers"] = model.num_layers
    return values


def build_generation_config(special: SpecialIds) -> dict[str, Any]:
    """Give the content of `generation_config.json`: where to begin and stop, nothing of taste."""
    return {name: value for name, value in special.to_json().items() if value is not None}


def _rotary(model: ModelConfig) -> dict[str, Any]:
    """Give the rotary numbers twice: at the places of version 4 and at that of version 5."""
    scaling = _scaling(model)
    stretched = scaling or {"rope_type": "default"}
    return {
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": model.rope_theta, **stretched},
    }


def _scaling(model: ModelConfig) -> dict[str, Any] | None:
    scaling = model.rope_scaling
    if scaling is None:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": scaling.kind,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position_embeddings,
    }
