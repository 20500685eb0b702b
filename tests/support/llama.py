"""The same model as a `LlamaForCausalLM` of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.model.config import ModelConfig


def llama_of(
    config: ModelConfig, params: Mapping[str, Mapping[str, Tensor]], dtype: torch.dtype
) -> Any:
    """Build the model and load `params[stage][name]` into it; every tensor must find its place."""
    import transformers

    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            max_position_embeddings=config.max_position_embeddings,
            rope_theta=config.rope_theta,
            rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=config.tied_embeddings,
            attention_bias=config.attention_bias,
            attention_dropout=0.0,
            attn_implementation="sdpa",
        )
    )
    frequencies = model.model.rotary_emb.inv_freq.clone()
    model.to(dtype)
    # Casting a model rounds its angles too; a model that is loaded in `dtype` keeps them in fp32.
    model.model.rotary_emb.inv_freq = frequencies
    named = {
        llama_name(stage, name): tensor.detach().to(dtype)
        for stage, shard in params.items()
        for name, tensor in shard.items()
    }
    if config.tied_embeddings:
        named["lm_head.weight"] = named["model.embed_tokens.weight"]
    model.load_state_dict(named)
    return model


def llama_name(stage: str, name: str) -> str:
    """Give the name of a stage's tensor in a Llama checkpoint."""
    if stage.startswith("block_"):
        return f"model.layers.{int(stage.removeprefix('block_'))}.{name}"
    prefix = {"embeddings": "model.embed_tokens", "final_norm": "model.norm"}.get(stage, stage)
    return f"{prefix}.{name}"
