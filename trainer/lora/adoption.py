"""Adapters on an imported base that has none yet.

Owns their first values: those of `peft`, A uniform within 1 / sqrt(inputs) and B zero, so that the
first step begins at the base; and state that is zero. Invariant: the values follow from seed, stage
and name alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from shardb import ShardView, StagedShard, TensorSpec, torch_adaptor
from trainer.adoption import empty_shard
from trainer.lora.stages import AdaptedStage
from trainer.model.initialise import generator_of
from trainer.step import ShardTransaction


class NewAdapters:
    """A transaction of a first step, in which every adapter has its first values."""

    def __init__(
        self,
        txn: ShardTransaction,
        stages: Mapping[str, AdaptedStage],
        specs: Mapping[str, Mapping[str, TensorSpec]],
        seed: int,
    ) -> None:
        self._txn = txn
        self._stages = stages
        self._specs = specs
        self._seed = seed
        self._staged: set[str] = set()

    def read(self, name: str) -> ShardView:
        """Give a shard as it is staged, else as the base has it, else with its first values."""
        if name in self._staged or name not in self._specs:
            return self._txn.read(name)
        view = empty_shard(name, self._specs[name])
        kind, _, stage = name.partition("/")
        if kind == "adapters":
            fill_first(self._stages[stage], self._seed, torch_adaptor.tensors(view))
        return view

    def stage(self, name: str, like: ShardView | Mapping[str, TensorSpec]) -> StagedShard:
        """Give the writable image of a shard of the next commit."""
        staged = self._txn.stage(name, like)
        self._staged.add(name)
        return staged

    def discard(self, name: str) -> None:
        """Drop what is staged of a shard, so that it can be staged again."""
        self._txn.discard(name)
        self._staged.discard(name)


def fill_first(stage: AdaptedStage, seed: int, targets: Mapping[str, Tensor]) -> None:
    """Write the first values of a stage's adapters."""
    for name, parameter in stage.parameters.items():
        if parameter.initial == "zeros":
            targets[name].zero_()
        else:
            bound = 1.0 / math.sqrt(parameter.shape[1])
            targets[name].uniform_(-bound, bound, generator=generator_of(seed, stage.name, name))
