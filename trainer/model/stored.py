"""The model as a store holds it: its geometry and its tokenizer, a frozen shard each.

Owns the names and the encoding. Knows nothing of training or packages. Invariant: equal models give
equal bytes, and a model that was read is buildable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardb import ReadView, Transaction
from trainer.errors import InputError
from trainer.model.config import ModelConfig

MODEL_SHARD = "meta/model"
TOKENIZER_SHARD = "meta/tokenizer"
# What a run was asked for; an import has none.
RECIPE_SHARD = "meta/recipe"
# What an import keeps of its package; `export.source_package` reads and writes them.
SOURCE_SHARD = "meta/source"
TOKENIZER_FILES_SHARD = "meta/tokenizer_files"
TENSOR = "json"


def canonical_json(values: Mapping[str, Any]) -> bytes:
    """Encode with sorted keys and without spaces; floats keep all their digits."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def read_model(view: ReadView) -> ModelConfig:
    """Read the model of a commit; InputError when the commit holds none."""
    if MODEL_SHARD not in view.names():
        raise InputError(
            f"step {view.commit.step} of branch {view.commit.branch} holds no model (no shard"
            f" {MODEL_SHARD}): give the store of a training run or of an import"
        )
    return ModelConfig.from_json(json.loads(read_bytes(view, MODEL_SHARD)))


def write_model(txn: Transaction, model: ModelConfig) -> None:
    """Stage the model's geometry."""
    write_bytes(txn, MODEL_SHARD, canonical_json(model.to_json()))


def read_bytes(view: ReadView, shard: str) -> bytes:
    """Read a meta shard's content."""
    return view.read(shard).array(TENSOR).tobytes()


def write_bytes(txn: Transaction, shard: str, data: bytes) -> None:
    """Stage a meta shard, frozen: each commit carries it over."""
    array = np.frombuffer(data, dtype=np.uint8)
    txn.write(shard, {TENSOR: array}, trainable=False)
