"""The model families that can be imported, and where their tensors go.

Owns the families' names, what their configuration means where a field is left out, and the mapping
between a package's tensor names and shards. Knows nothing of files. Defaults are those of the
families' configuration classes in transformers, which fill in what a package leaves out.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from trainer.errors import InputError
from trainer.model.config import ModelConfig
from trainer.model.stages import Stage, build_stages


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One model family.

    native: whether this project's own stages may compute it. query_bias, output_bias: whether
    attention has biases; None where `attention_bias` decides. final_norm: the norm's name.
    """

    model_type: str
    native: bool = False
    tied_by_default: bool = False
    query_bias: bool | None = None
    output_bias: bool | None = None
    qk_norm: bool = False
    final_norm: str = "norm"
    defaults: Mapping[str, Any] = field(default_factory=dict)


_RMS = {"rms_norm_eps": 1e-6, "initializer_range": 0.02, "attention_bias": False}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.model_type: family
        for family in (
            Family(
                model_type="llama", native=True, defaults=_RMS | {"max_position_embeddings": 2048}
            ),
            Family(
                model_type="mistral",
                native=True,
                query_bias=False,
                output_bias=False,
                defaults=_RMS
                | {
                    "max_position_embeddings": 131072,
                    "num_key_value_heads": 8,
                    "sliding_window": 4096,
                },
            ),
            Family(
                model_type="qwen2",
                native=True,
                query_bias=True,
                output_bias=False,
                defaults=_RMS | {"max_position_embeddings": 32768, "num_key_value_heads": 32},
            ),
            Family(
                model_type="qwen3",
                native=True,
                qk_norm=True,
                defaults=_RMS
                | {
                    "max_position_embeddings": 32768,
                    "num_key_value_heads": 32,
                    "head_dim": 128,
                },
            ),
            Family(model_type="gemma", tied_by_default=True),
            Family(model_type="gemma2", tied_by_default=True),
            Family(model_type="gemma3_text", tied_by_default=True),
            Family(model_type="phi", final_norm="final_layernorm"),
            Family(model_type="phi3"),
        )
    }
)


def family_of(config: Mapping[str, Any]) -> Family:
    """Give the family that a configuration names; InputError lists the supported ones."""
    model_type = config.get("model_type")
    supported = ", ".join(FAMILIES)
    if not isinstance(model_type, str):
        raise InputError(
            f"config.json: model_type is {model_type!r}: it must name the family; supported are"
            f" {supported}"
        )
    if model_type not in FAMILIES:
        near = difflib.get_close_matches(model_type, FAMILIES, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise InputError(
            f"config.json: model_type {model_type!r} is not supported{hint}: supported families are"
            f" {supported}"
        )
    return FAMILIES[model_type]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a tensor of a package goes, and the shape that the configuration gives it."""

    stage: str
    tensor: str
    shape: tuple[int, ...]

    @property
    def shard(self) -> str:
        """Give the shard's name."""
        return f"params/{self.stage}"


def places(family: Family, model: ModelConfig) -> dict[str, Place]:
    """Give the place of every tensor that a package of this model must hold, by its name there."""
    return {
        f"{_prefix(family, stage)}.{name}": Place(
            stage=stage.name, tensor=name, shape=parameter.shape
        )
        for stage in build_stages(model)
        for name, parameter in stage.parameters.items()
    }


def _prefix(family: Family, stage: Stage) -> str:
    if stage.name.startswith("block_"):
        return f"model.layers.{int(stage.name.removeprefix('block_'))}"
    return {"embeddings": "model.embed_tokens", "final_norm": f"model.{family.final_norm}"}.get(
        stage.name, stage.name
    )
