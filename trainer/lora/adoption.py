"""Adapters on an imported base that has none yet.

Owns their first values: those of `peft`, A uniform within 1 / sqrt(inputs) and B zero, so that the
first step begins at the base; and state that is zero. Invariant: the values follow from seed, stage
and name alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from shardb import ShardView, TensorSpec, torch_adaptor
from trainer.adoption import FirstTransaction, empty_shard
from trainer.lora.stages import AdaptedStage
from trainer.model.initialise import generator_of
from trainer.step import ShardTransaction


class NewAdapters(FirstTransaction):
    """A transaction of a first step, in which every adapter has its first values."""

    def __init__(
        self,
        txn: ShardTransaction,
        stages: Mapping[str, AdaptedStage],
        specs: Mapping[str, Mapping[str, TensorSpec]],
        seed: int,
    ) -> None:
        super().__init__(txn, specs)
        self._stages = stages
        self._seed = seed

    def _first(self, name: str, specs: Mapping[str, TensorSpec]) -> ShardView:
        view = empty_shard(name, specs)
        kind, _, stage = name.partition("/")
        if kind == "adapters":
            fill_first(self._stages[stage], self._seed, torch_adaptor.tensors(view))
        return view


def fill_first(stage: AdaptedStage, seed: int, targets: Mapping[str, Tensor]) -> None:
    """Write the first values of a stage's adapters."""
    for name, parameter in stage.parameters.items():
        if parameter.initial == "zeros":
            targets[name].zero_()
        else:
            bound = 1.0 / math.sqrt(parameter.shape[1])
            targets[name].uniform_(-bound, bound, generator=generator_of(seed, stage.name, name))
