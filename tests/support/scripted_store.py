"""A store whose model says what it is told to: greedy logits spell a given list of tokens.

The model is an ordinary one of this project, in ordinary shards. Every token that the script has
once leads to the next one: the embedding of a token is a unit vector of its own, the blocks add
nothing, and the head gives each token's follower the largest logit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

import shardb
from shardb.records import Commit
from trainer.model.config import ModelConfig
from trainer.model.stages import build_stages
from trainer.model.stored import MODEL_SHARD, TOKENIZER_SHARD

LOGIT = 20.0


def scripted_config(vocab_size: int, *, window: int = 256, eos_token_id: int = 2) -> ModelConfig:
    """Give the geometry of a scripted model: one dimension a token, one block."""
    width = -(-vocab_size // 16) * 16
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_layers=1,
        num_heads=1,
        head_dim=16,
        intermediate_size=16,
        max_position_embeddings=window,
        eos_token_id=eos_token_id,
    )


def followers_of(*scripts: Sequence[int]) -> dict[int, int]:
    """Give the follower of each token; a token with two of them cannot be scripted."""
    followers: dict[int, int] = {}
    for script in scripts:
        for token, following in pairwise(script):
            assert followers.setdefault(token, following) == following, (token, script)
    return followers


def write_scripted_store(
    root: Path,
    followers: Mapping[int, int],
    *,
    vocab_size: int,
    step: int = 0,
    window: int = 256,
    eos_token_id: int = 2,
    tokenizer: bytes | None = None,
    branch: str = "main",
) -> Commit:
    """Commit a model in which `followers[t]` comes after t, and the end token after all others."""
    config = scripted_config(vocab_size, window=window, eos_token_id=eos_token_id)
    arrays: dict[str, dict[str, np.ndarray]] = {}
    for stage in build_stages(config):
        arrays[f"params/{stage.name}"] = {
            name: np.full(each.shape, 1.0 if each.initial == "ones" else 0.0, np.float32)
            for name, each in stage.parameters.items()
        }
    table = arrays["params/embeddings"]["weight"]
    head = arrays["params/lm_head"]["weight"]
    for token in range(vocab_size):
        table[token, token] = 1.0
        # The norm before the head makes the one value of a token the root of the width.
        head[followers.get(token, eos_token_id), token] = LOGIT / config.hidden_size**0.5
    with shardb.open(root, create=True) as store, store.begin(branch) as txn:
        for name, tensors in arrays.items():
            txn.write(name, tensors)
        meta = {MODEL_SHARD: json.dumps(config.to_json(), sort_keys=True).encode()}
        if tokenizer is not None:
            meta[TOKENIZER_SHARD] = tokenizer
        for name, data in meta.items():
            txn.write(name, {"json": np.frombuffer(data, dtype=np.uint8)}, trainable=False)
        return txn.commit(step=step, state={}, metrics={})
