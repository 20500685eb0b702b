"""An imported model on its way into training: weights of any form, and no optimizer state yet.

Owns what a first step reads where a store holds an import: masters in the run's own form, made
from the imported weights a shard at a time, and state that is zero. Knows nothing of packages.
Invariants: a value changes only where the run's form cannot hold it; the imported commit is never
touched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardb import Commit, ShardView, StagedShard, Store, TensorSpec, torch_adaptor
from shardb.layout import build
from trainer.model.config import ModelConfig
from trainer.model.stored import (
    MODEL_SHARD,
    RECIPE_SHARD,
    TOKENIZER_SHARD,
    read_bytes,
    read_model,
)
from trainer.step import ShardTransaction

PAGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportedModel:
    """A commit that holds a model and no run; `tokenizer` is its tokenizer.json, if it has one."""

    commit: Commit
    model: ModelConfig
    tokenizer: bytes | None


def is_import(commit: Commit) -> bool:
    """Say whether a commit holds a model and no run."""
    return MODEL_SHARD in commit.shards and RECIPE_SHARD not in commit.shards


def read_imported(store: Store, commit: Commit) -> ImportedModel | None:
    """Read the model of an imported commit; None where the commit is of a run."""
    if not is_import(commit):
        return None
    with store.at(commit=commit.id) as view:
        has_tokenizer = TOKENIZER_SHARD in view.names()
        return ImportedModel(
            commit=commit,
            model=read_model(view),
            tokenizer=read_bytes(view, TOKENIZER_SHARD) if has_tokenizer else None,
        )


class FirstTransaction(ABC):
    """A transaction of a first step, in which every shard of `specs` already has that form.

    What is staged is read as it is, and so is every other shard.
    """

    def __init__(
        self, txn: ShardTransaction, specs: Mapping[str, Mapping[str, TensorSpec]]
    ) -> None:
        self._txn = txn
        self._specs = specs
        self._staged: set[str] = set()

    def read(self, name: str) -> ShardView:
        """Give a shard as it is staged, else as the transaction has it or with first values."""
        if name in self._staged or name not in self._specs:
            return self._txn.read(name)
        return self._first(name, self._specs[name])

    @abstractmethod
    def _first(self, name: str, specs: Mapping[str, TensorSpec]) -> ShardView:
        """Give a shard that the run has never staged, in its form."""

    def stage(self, name: str, like: ShardView | Mapping[str, TensorSpec]) -> StagedShard:
        """Give the writable image of a shard of the next commit."""
        staged = self._txn.stage(name, like)
        self._staged.add(name)
        return staged

    def discard(self, name: str) -> None:
        """Drop what is staged of a shard, so that it can be staged again."""
        self._txn.discard(name)
        self._staged.discard(name)


class AdoptingTransaction(FirstTransaction):
    """A first step on an import: parameters are those of the import, state is zero."""

    def _first(self, name: str, specs: Mapping[str, TensorSpec]) -> ShardView:
        if not name.startswith("params/"):
            return empty_shard(name, specs)
        view = self._txn.read(name)
        if dict(view.specs) == dict(specs):
            return view
        masters = empty_shard(name, specs)
        imported = torch_adaptor.tensors(view)
        for tensor, target in torch_adaptor.tensors(masters).items():
            target.copy_(imported[tensor])
        return masters


def empty_shard(name: str, specs: Mapping[str, TensorSpec]) -> ShardView:
    """Make a shard of zeros in memory of its own, aligned as those of a store are."""
    layout = build(specs)
    memory = np.zeros(layout.size_bytes + PAGE_BYTES, dtype=np.uint8)
    start = -memory.ctypes.data % PAGE_BYTES
    image = memory[start : start + layout.size_bytes]
    image[: len(layout.header)] = np.frombuffer(layout.header, dtype=np.uint8)
    return ShardView(name, layout, image, None)
