"""Do the geometries of other model families give the logits of transformers, bit for bit?

Mistral, Qwen2 and Qwen3 differ from Llama in biases, norms of queries and keys, and head widths;
Llama 3 in its rotary scaling. Each is only configuration here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.llama import llama_name
from tests.support.memory_training import MemoryTraining, random_ids
from tests.support.tiny_model import TINY, random_rows
from trainer.engine import EngineOptions
from trainer.model.config import ModelConfig

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install '.[test]'"
)

LLAMA3 = replace(
    TINY,
    rope_theta=500000.0,
    rope_scaling_type="llama3",
    rope_scaling_factor=8.0,
    rope_scaling_original_max_position_embeddings=32,
)
LINEAR = replace(TINY, rope_scaling_type="linear", rope_scaling_factor=4.0)
CASES: dict[str, tuple[str, ModelConfig]] = {
    "llama3": ("Llama", LLAMA3),
    "llama3-other-factors": (
        "Llama",
        replace(
            LLAMA3, rope_scaling_low_freq_factor=2.0, rope_scaling_high_freq_factor=16.0,
            rope_theta=10000.0,
        ),
    ),
    "linear": ("Llama", LINEAR),
    "mistral": ("Mistral", TINY),
    "qwen2": ("Qwen2", replace(TINY, head_dim=12, attention_bias=True, rms_norm_eps=1e-6)),
    "qwen2-tied": ("Qwen2", replace(TINY, head_dim=12, attention_bias=True, tied_embeddings=True)),
    "qwen3": ("Qwen3", replace(TINY, head_dim=32, qk_norm=True, rope_theta=1e6)),
}  # fmt: skip


def rotary_of(config: ModelConfig) -> dict[str, Any]:
    """Give the rotary part of a configuration, as old and new versions of transformers read it."""
    if config.rope_scaling_type == "none":
        return {"rope_theta": config.rope_theta}
    scaling: dict[str, Any] = {"rope_type": config.rope_scaling_type}
    scaling["factor"] = config.rope_scaling_factor
    if config.rope_scaling_type == "llama3":
        scaling |= {
            "low_freq_factor": config.rope_scaling_low_freq_factor,
            "high_freq_factor": config.rope_scaling_high_freq_factor,
            "original_max_position_embeddings": (
                config.rope_scaling_original_max_position_embeddings
            ),
        }
    return {"rope_theta": config.rope_theta, "rope_scaling": scaling}


def peer_of(family: str, config: ModelConfig, params: Mapping[str, Mapping[str, Tensor]]) -> Any:
    """Build the family's own model in fp32 with these weights; every tensor finds its place."""
    values: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "attn_implementation": "sdpa",
        **rotary_of(config),
    }
    if family != "Qwen2":
        values["head_dim"] = config.head_dim
    if family == "Mistral":
        values["sliding_window"] = None
    made = getattr(transformers, f"{family}Config")(**values)
    model = getattr(transformers, f"{family}ForCausalLM")(made)
    named = {
        llama_name(stage, name): tensor.detach().float()
        for stage, shard in params.items()
        for name, tensor in shard.items()
    }
    if config.tied_embeddings:
        named["lm_head.weight"] = named["model.embed_tokens.weight"]
    model.load_state_dict(named)
    return model.eval()


def both_logits(family: str, config: ModelConfig, peer: ModelConfig) -> tuple[Tensor, Tensor]:
    training = MemoryTraining(config, EngineOptions())
    training.step([random_rows(1)])
    ids = random_ids(2, (2, config.max_position_embeddings), config.vocab_size)
    with torch.no_grad():
        return training.logits(ids), peer_of(family, peer, training.params())(ids).logits


@pytest.mark.parametrize("case", CASES)
def test_logits_have_the_same_bits(case: str) -> None:
    family, config = CASES[case]
    ours, theirs = both_logits(family, config, config)
    assert ours.shape[1] >= 64
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "other",
    [TINY, replace(LLAMA3, rope_scaling_factor=7.0), LINEAR],
    ids=["unscaled", "factor", "linear"],
)
def test_control_another_scaling_gives_other_logits(other: ModelConfig) -> None:
    ours, theirs = both_logits("Llama", LLAMA3, other)
    assert not torch.allclose(ours, theirs, atol=1e-4)
