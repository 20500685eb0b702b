"""From a package's `config.json` to a model that can be built.

Owns the reading of both forms of configuration (`rope_theta` and `rope_parameters`, `torch_dtype`
and `dtype`), the values that a family fills in, and the choice between this project's stages and
the layers of transformers. Knows nothing of tensors or files. Invariants: two forms that disagree
are refused; what the native stages would compute differently is never given to them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from export.families import Family, family_of
from trainer.errors import InputError
from trainer.model.config import ModelConfig

CONFIG = "config.json"
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
}
DEFAULT_THETA = 10000.0
# Says nothing of the model: who wrote the file, where it lay, what the weights were stored as.
NOT_OF_THE_MODEL = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadConfig:
    """A configuration: the family, the model, whether it says that the head is tied, and notes."""

    family: Family
    model: ModelConfig
    notes: tuple[str, ...]


def read_model_config(config: Mapping[str, Any], *, stages: str = "auto") -> ReadConfig:
    """Read a configuration; `stages` is auto, native or transformers.

    Raises InputError: an unsupported family, a missing or contradictory field, a quantised model.
    """
    family = family_of(config)
    _refuse_quantised(config)
    dtype_forms = {config[name] for name in ("dtype", "torch_dtype") if config.get(name)}
    if len(dtype_forms) > 1:
        raise InputError(f"{CONFIG}: dtype and torch_dtype disagree: {sorted(dtype_forms)}")
    rope = _rope(config)
    filled = {**family.defaults, **{k: v for k, v in config.items() if v is not None}}
    reasons = _not_native(family, config, filled, rope)
    if stages == "native" and reasons:
        raise InputError(
            f"--stages native: {'; '.join(reasons)}: leave the flag out to run the layers of"
            " transformers"
        )
    if stages == "transformers" or (stages == "auto" and reasons):
        return _through_transformers(family, config, reasons)
    return ReadConfig(family=family, model=_native_model(family, filled, rope), notes=())


def _refuse_quantised(config: Mapping[str, Any]) -> None:
    quantised = config.get("quantization_config")
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise InputError(
            f"{CONFIG}: the weights are quantised ({method}): fetch the package with weights in"
            " bfloat16, float16 or float32"
        )


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give the rotary parameters in the new form; InputError where the two forms disagree."""
    new, theta, scaling = (
        config.get(name) for name in ("rope_parameters", "rope_theta", "rope_scaling")
    )
    old: dict[str, Any] = {"rope_type": "default"}
    if isinstance(scaling, dict):
        old |= {k: v for k, v in scaling.items() if k != "type"}
        old["rope_type"] = scaling.get("rope_type", scaling.get("type", "default"))
    if theta is not None:
        old["rope_theta"] = theta
    if not isinstance(new, dict):
        return old
    told = {**new, "rope_type": new.get("rope_type", "default")}
    if any(isinstance(value, dict) for value in new.values()):
        return told  # one set a kind of layer: never native
    if theta is not None and told.setdefault("rope_theta", theta) != theta:
        raise InputError(
            f"{CONFIG}: rope_theta is {theta}, but rope_parameters has {told['rope_theta']}: two"
            " readers would load two models: make them equal"
        )
    if isinstance(scaling, dict) and old["rope_type"] != told["rope_type"]:
        raise InputError(
            f"{CONFIG}: rope_scaling is of type {old['rope_type']!r}, but rope_parameters of type"
            f" {told['rope_type']!r}: make them equal"
        )
    return told


def _not_native(
    family: Family,
    config: Mapping[str, Any],
    filled: Mapping[str, Any],
    rope: Mapping[str, Any],
) -> list[str]:
    """Give what the native stages cannot compute; empty where they can compute all of it."""
    if not family.native:
        return [f"the blocks of {family.model_type} are not those of Llama"]
    found = []
    if filled.get("hidden_act", "silu") not in ("silu", "swish"):
        found.append(f"hidden_act is {filled['hidden_act']!r}")
    if filled.get("mlp_bias"):
        found.append("mlp_bias is true")
    if filled.get("partial_rotary_factor", 1.0) != 1.0 or rope.get("partial_rotary_factor"):
        found.append("only a part of each head is rotated")
    if rope["rope_type"] not in ("default", "linear", "llama3"):
        found.append(f"rotary positions are of type {rope['rope_type']!r}")
    window = _active_window(config, filled)
    if window is not None:
        found.append(f"attention slides over a window of {window} positions")
    return found


def _active_window(config: Mapping[str, Any], filled: Mapping[str, Any]) -> int | None:
    """Give the width of a sliding window that changes something within the model's positions."""
    window = filled.get("sliding_window")
    if "sliding_window" in config and config["sliding_window"] is None:
        window = None
    if config["model_type"] in ("qwen2", "qwen3") and not filled.get("use_sliding_window"):
        window = None
    if window is None and "sliding_attention" in (filled.get("layer_types") or ()):
        raise InputError(f"{CONFIG}: layer_types has sliding_attention, but no window is set")
    if not isinstance(window, int) or window >= filled["max_position_embeddings"]:
        return None
    return window


def _native_model(
    family: Family, filled: Mapping[str, Any], rope: Mapping[str, Any]
) -> ModelConfig:
    """Translate the fields; one that is missing without a default is refused by its own name."""
    missing = [name for name in SIZES.values() if filled.get(name) is None]
    if missing:
        raise InputError(f"{CONFIG}: {', '.join(missing)} is missing: fetch the file again")
    biased = bool(filled["attention_bias"])
    return _built(
        {
            **{ours: filled[theirs] for ours, theirs in SIZES.items()},
            "num_kv_heads": filled.get("num_key_value_heads", 0),
            "head_dim": filled.get("head_dim", 0),
            "max_position_embeddings": filled["max_position_embeddings"],
            "rope_theta": rope.get("rope_theta", DEFAULT_THETA),
            **_rope_scaling(rope),
            "rms_norm_eps": filled["rms_norm_eps"],
            "initializer_range": filled["initializer_range"],
            "tied_embeddings": filled.get("tie_word_embeddings", family.tied_by_default),
            "attention_bias": biased if family.query_bias is None else family.query_bias,
            "attention_output_bias": biased if family.output_bias is None else family.output_bias,
            "qk_norm": family.qk_norm,
            **token_ids(filled),
        }
    )


def _rope_scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    if rope["rope_type"] == "default":
        return {}
    names = ["factor"]
    if rope["rope_type"] == "llama3":
        names += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    missing = [name for name in names if rope.get(name) is None]
    if missing:
        raise InputError(f"{CONFIG}: {rope['rope_type']} rotary scaling lacks {missing[0]}")
    return {
        "rope_scaling_type": rope["rope_type"],
        **{f"rope_scaling_{name}": rope[name] for name in names},
    }


def token_ids(config: Mapping[str, Any]) -> dict[str, int]:
    """Give the ids that begin, end and pad; where there is none, one that is there stands in."""
    size = config["vocab_size"]

    def of(name: str) -> int | None:
        value = config.get(name)
        first = value[0] if isinstance(value, list) and value else value
        return first if isinstance(first, int) and 0 <= first < size else None

    bos, eos, pad = (of(f"{name}_token_id") for name in ("bos", "eos", "pad"))
    known = next((i for i in (eos, bos, pad) if i is not None), 0)
    named = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    return {name: known if value is None else value for name, value in named.items()}


def _built(values: Mapping[str, Any]) -> ModelConfig:
    try:
        return ModelConfig(**values)
    except (InputError, TypeError) as error:
        raise InputError(f"{CONFIG}: {error}") from error


def _through_transformers(
    family: Family, config: Mapping[str, Any], reasons: list[str]
) -> ReadConfig:
    """Let transformers read the configuration, and fill in what it leaves out."""
    from trainer.model.hf_family import filled_config

    own = {k: v for k, v in config.items() if k not in NOT_OF_THE_MODEL}
    filled = filled_config(own)
    missing = [name for name in SIZES.values() if own.get(name) is None]
    if missing:
        raise InputError(f"{CONFIG}: {', '.join(missing)} is missing: fetch the file again")
    heads = filled["num_attention_heads"]
    model = _built(
        {
            **{ours: filled[theirs] for ours, theirs in SIZES.items()},
            "num_kv_heads": filled.get("num_key_value_heads") or heads,
            "head_dim": filled.get("head_dim") or filled["hidden_size"] // heads,
            "max_position_embeddings": filled["max_position_embeddings"],
            "rms_norm_eps": filled.get("rms_norm_eps") or filled.get("layer_norm_eps") or 1e-6,
            "initializer_range": filled.get("initializer_range") or 0.02,
            "tied_embeddings": filled.get("tie_word_embeddings", family.tied_by_default),
            **token_ids(filled),
            "hf_config": json.dumps(own, sort_keys=True, separators=(",", ":")),
        }
    )
    why = "; ".join(reasons) or "--stages transformers"
    return ReadConfig(
        family=family,
        model=model,
        notes=(f"its blocks are computed by the layers of transformers: {why}",),
    )
