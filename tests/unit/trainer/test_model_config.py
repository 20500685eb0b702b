"""Every rule of a model configuration refuses by field name and says what to do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trainer.errors import InputError
from trainer.model.config import ModelConfig

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_size": 96,
}


def test_heads_default_to_an_even_share() -> None:
    config = ModelConfig(**SIZES)
    assert (config.num_kv_heads, config.head_dim) == (4, 12)


def test_explicit_head_width_needs_no_divisor() -> None:
    config = ModelConfig(**{**SIZES, "hidden_size": 50}, head_dim=16)
    assert (config.query_size, config.key_value_size) == (64, 64)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hidden_size": 50}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 48.0}, "hidden_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"num_layers": 0}, "num_layers"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"num_kv_heads": -1}, "num_kv_heads"),
        ({"num_kv_heads": 8}, "num_kv_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"head_dim": -2}, "head_dim"),
        ({"dropout": 0.1}, "dropout"),
        ({"dropout": float("nan")}, "dropout"),
        ({"rope_theta": 0.0}, "rope_theta"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"initializer_range": float("inf")}, "initializer_range"),
        ({"eos_token_id": 100}, "eos_token_id"),
        ({"pad_token_id": -1}, "pad_token_id"),
        ({"tied_embeddings": 1}, "tied_embeddings"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
    ],
)
def test_refused_by_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=field) as refusal:
        ModelConfig(**{**SIZES, **change})
    assert refusal.value.exit_code == 2


def test_hidden_size_that_does_not_divide_says_both_numbers() -> None:
    with pytest.raises(InputError, match="50 is not divisible by num_heads 4"):
        ModelConfig(**{**SIZES, "hidden_size": 50})


def test_json_round_trip() -> None:
    config = ModelConfig(**SIZES, num_kv_heads=2, tied_embeddings=True, rope_theta=500000.0)
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_whole_numbers_are_fractions_where_those_are_meant() -> None:
    config = ModelConfig.from_json({**SIZES, "rope_theta": 10000, "dropout": 0})
    assert type(config.rope_theta) is float
    assert type(config.dropout) is float


def test_unknown_field_is_refused() -> None:
    with pytest.raises(InputError, match="hidden_sise"):
        ModelConfig.from_json({**SIZES, "hidden_sise": 3})


def test_missing_field_is_refused() -> None:
    with pytest.raises(InputError, match="vocab_size"):
        ModelConfig.from_json({name: v for name, v in SIZES.items() if name != "vocab_size"})
