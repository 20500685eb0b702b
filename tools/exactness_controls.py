"""Runs that are broken on purpose, in ways that are easy to make by mistake.

Owns the faults. Each changes one step of a streamed run, through the engine that the run uses, and
the comparison with resident training must notice it. Knows nothing of comparing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardb import ShardView, TensorSpec
from shardb.views import StagedShard
from tools.exactness_cells import Cell, all_cells
from trainer.engine import Engine, StepResult
from trainer.run import Run
from trainer.step import ShardTransaction

BROKEN_STEP = 9
SHARD = "params/block_001"
READS_MAX = 64

Rows = NDArray[np.integer]


class SkippedUpdate(Engine):
    """One shard is committed as it was."""

    def train_step(
        self, txn: ShardTransaction, micro_batches: Sequence[Rows], **how: Any
    ) -> StepResult:
        """Undo the update of one shard."""
        before = txn.read(SHARD)
        result = super().train_step(txn, micro_batches, **how)
        if how["step"] == BROKEN_STEP:
            txn.discard(SHARD)
            staged = txn.stage(SHARD, like=before)
            for name, array in staged.arrays().items():
                array[...] = before.array(name)
            staged.seal()
        return result


class StaleBuffer(Engine):
    """The forward pass sees a shard of the step before.

    In a pipeline it may have been done before the step began, so the rest of the step sees it.
    """

    def train_step(
        self, txn: ShardTransaction, micro_batches: Sequence[Rows], **how: Any
    ) -> StepResult:
        """Keep a copy of the shard, and at one step read the copy of the step before."""
        now = txn.read(SHARD)
        copies: dict[int, ShardView] = self.__dict__.setdefault("copies", {})
        copies[how["step"]] = ShardView(now.name, now.layout, now.image.copy(), None)
        if how["step"] == BROKEN_STEP:
            reads = 1 if self.pipeline is None else READS_MAX
            txn = _StaleTransaction(txn, [copies[BROKEN_STEP - 1]] * reads)
        return super().train_step(txn, micro_batches, **how)


class SwappedMicroBatches(Engine):
    """Two micro-batches are summed in each other's place."""

    def train_step(
        self, txn: ShardTransaction, micro_batches: Sequence[Rows], **how: Any
    ) -> StepResult:
        """Swap the first and the last: the first two would give the same sum."""
        if how["step"] == BROKEN_STEP:
            micro_batches = [micro_batches[-1], *micro_batches[1:-1], micro_batches[0]]
        return super().train_step(txn, micro_batches, **how)


class WrongLossScale(Engine):
    """The loss is scaled, and unscaled again, by what is no power of two."""

    def train_step(
        self, txn: ShardTransaction, micro_batches: Sequence[Rows], **how: Any
    ) -> StepResult:
        """Multiply the scale of one step."""
        if how["step"] == BROKEN_STEP:
            how["loss_scale"] *= 0.75
        return super().train_step(txn, micro_batches, **how)


CONTROLS: Mapping[str, type[Engine]] = MappingProxyType(
    {
        "one shard's update skipped": SkippedUpdate,
        "a stale buffer": StaleBuffer,
        "two micro-batches swapped": SwappedMicroBatches,
        "a wrong loss scale": WrongLossScale,
    }
)


def break_run(run: Run, control: str) -> None:
    """Let a run that was opened make the mistake."""
    run.engine.__class__ = CONTROLS[control]


def controls() -> list[tuple[str, Cell]]:
    """Give every mistake, with cells of each optimizer and each clip mode to make it in.

    Only fp16 has a scale, and only the others go through the device's pipeline. Micro-batches are
    swapped in fp32: sums of three gradients of fewer bits are mostly exact in fp32, so that their
    order changes nothing.
    """
    modes = {
        ("adamw", "global"): ("off", "sync", "active"),
        ("lion", "shard"): ("cpu", "async", "durable"),
        ("adafactor", "none"): ("cpu", "sync", "active"),
    }
    dtypes = {
        "one shard's update skipped": ("fp16", "fp32"),
        "a stale buffer": ("fp16", "fp32"),
        "two micro-batches swapped": ("fp32",),
        "a wrong loss scale": ("fp16",),
    }
    return [
        (control, cell)
        for control in CONTROLS
        for cell in all_cells()
        if cell.accumulation == 3
        and cell.dtype in dtypes[control]
        and modes.get((cell.optimizer, cell.clip)) == (cell.prefetch, cell.writes, cell.store)
    ]


class _StaleTransaction:
    """A transaction whose first looks at a shard give copies that are kept."""

    def __init__(self, txn: ShardTransaction, stale: list[ShardView]) -> None:
        self._txn = txn
        self._stale = stale

    def read(self, name: str) -> ShardView:
        """Give the shard, or a copy while there is one."""
        if name == SHARD and self._stale:
            return self._stale.pop()
        return self._txn.read(name)

    def stage(self, name: str, like: ShardView | Mapping[str, TensorSpec]) -> StagedShard:
        """Give the writable image."""
        return self._txn.stage(name, like)

    def discard(self, name: str) -> None:
        """Drop what is staged."""
        self._txn.discard(name)
