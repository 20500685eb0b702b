"""The model's geometry: one frozen description, validated once.

Owns the meaning of every field and the rules between them. Knows nothing of tensors, stages or
stores. Invariant: a `ModelConfig` that exists is buildable.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from trainer.errors import InputError
from trainer.model.rope_scaling import RopeScaling

# The largest of each: far above any model, and below where a product of some would overflow.
_SIZES_MAX = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "num_layers": 2**14,
    "num_heads": 2**14,
    "head_dim": 2**14,
    "intermediate_size": 2**24,
    "max_position_embeddings": 2**31,
}
_POSITIVE = ("rope_theta", "rms_norm_eps", "initializer_range")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder with RMSNorm, rotary positions and SwiGLU.

    `num_kv_heads` and `head_dim` may be left at 0: then every head has its own keys and values, and
    the heads share the hidden size evenly. After construction both hold their real value.
    `attention_bias` gives query, key and value a bias; `attention_output_bias` the output
    projection. `qk_norm` normalises each head's query and key before the rotation.
    `rope_scaling_type` is "none", "linear" or "llama3"; the numbers after it belong to it.
    `hf_config` is empty where the stages of this project compute the model; else it is the
    configuration, as JSON, whose layers `transformers` builds and `trainer.model.hf_stages` runs.

    Raises:
        InputError: a field is missing its rule; the message names the field and its flag.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int = 0
    head_dim: int = 0
    intermediate_size: int
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rope_scaling_type: str = "none"
    rope_scaling_factor: float = 1.0
    rope_scaling_low_freq_factor: float = 1.0
    rope_scaling_high_freq_factor: float = 4.0
    rope_scaling_original_max_position_embeddings: int = 0
    rms_norm_eps: float = 1e-5
    tied_embeddings: bool = False
    initializer_range: float = 0.02
    attention_bias: bool = False
    attention_output_bias: bool = False
    qk_norm: bool = False
    pad_token_id: int = 0
    bos_token_id: int = 1
    eos_token_id: int = 2
    dropout: float = 0.0
    hf_config: str = ""

    def __post_init__(self) -> None:
        _check_types(self)
        for name, most in _SIZES_MAX.items():
            size = getattr(self, name)
            least = 0 if name == "head_dim" else 1
            _require(size >= least, name, f"is {size}", f"give {least} or more")
            _require(size <= most, name, f"is {size}", f"give at most {most}")
        self._fill_heads()
        self._check_heads()
        self._check_values()

    @property
    def query_size(self) -> int:
        """Give the width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Give the width of all key heads, which is that of all value heads, together."""
        return self.num_kv_heads * self.head_dim

    @property
    def rope_scaling(self) -> RopeScaling | None:
        """Give how rotary frequencies are stretched; None where they are not."""
        return None if self.rope_scaling_type == "none" else self._rope_scaling()

    def to_json(self) -> dict[str, Any]:
        """Give every field by name, derived ones included, as values that JSON can hold.

        An empty `hf_config` is left out: models from before it was known keep their bytes.
        """
        values = asdict(self)
        return values if self.hf_config else {k: v for k, v in values.items() if k != "hf_config"}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ModelConfig:
        """Read what `to_json` gave; a missing or unknown field raises InputError."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(document) - known)
        if unknown:
            raise InputError(
                f"model configuration: unknown field {unknown[0]!r}: it was written by another "
                f"version, or misspelt; known fields are {', '.join(sorted(known))}"
            )
        try:
            return cls(**document)
        except TypeError as error:
            raise InputError(f"model configuration: {error}") from error

    def _fill_heads(self) -> None:
        if self.num_kv_heads == 0:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.head_dim == 0:
            _require(
                self.hidden_size % self.num_heads == 0,
                "hidden_size",
                f"{self.hidden_size} is not divisible by num_heads {self.num_heads}",
                "choose sizes that divide, or give the head's width with --head-dim",
            )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)

    def _check_heads(self) -> None:
        _require(
            self.num_kv_heads >= 1 and self.num_heads % self.num_kv_heads == 0,
            "num_kv_heads",
            f"{self.num_kv_heads} does not divide num_heads {self.num_heads}",
            "each group of query heads shares one key head: choose a divisor",
        )
        _require(
            self.head_dim >= 2 and self.head_dim % 2 == 0,
            "head_dim",
            f"is {self.head_dim}",
            "rotary positions turn pairs: choose an even width",
        )

    def _rope_scaling(self) -> RopeScaling:
        return RopeScaling(
            kind=self.rope_scaling_type,
            factor=self.rope_scaling_factor,
            low_freq_factor=self.rope_scaling_low_freq_factor,
            high_freq_factor=self.rope_scaling_high_freq_factor,
            original_max_position_embeddings=self.rope_scaling_original_max_position_embeddings,
        )

    def _check_values(self) -> None:
        fault = self._rope_scaling().fault()
        if fault is not None:
            _require(False, f"rope_scaling_{fault[0]}", fault[1], fault[2])
        for name in _POSITIVE:
            value = getattr(self, name)
            _require(value > 0 and math.isfinite(value), name, f"is {value}", "give more than 0")
        _require(
            self.dropout == 0,
            "dropout",
            f"is {self.dropout}",
            "set it to 0: a stage is computed twice in a step and both must agree",
        )
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            value = getattr(self, name)
            _require(
                0 <= value < self.vocab_size,
                name,
                f"{value} is outside the vocabulary of {self.vocab_size}",
                f"choose 0 to {self.vocab_size - 1}",
            )


def _check_types(config: ModelConfig) -> None:
    """Refuse values of another type, such as a string or true for a number."""
    for field in fields(ModelConfig):
        value = getattr(config, field.name)
        if field.type == "float" and type(value) is int:
            object.__setattr__(config, field.name, float(value))
        elif type(value).__name__ != field.type:
            raise InputError(
                f"model configuration: {field.name} is {value!r}: give a value of type {field.type}"
            )


def _require(holds: bool, field: str, fault: str, remedy: str) -> None:
    if not holds:
        raise InputError(f"model configuration: {field} {fault}: {remedy}")
