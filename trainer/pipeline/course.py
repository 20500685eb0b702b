"""From step to step through the pipeline: the next one's forward pass while this one is committed.

Owns the step that was begun ahead, and whether it is the one that is asked for. Knows nothing of
what a step does. Invariants: a step that was begun ahead is finished only for the same step number,
the same rows and a base whose images are those it was begun from; every other one is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.device_lanes import Lane
from trainer.errors import InputError
from trainer.pipeline.feeding import UnknownLayoutError
from trainer.pipeline.pipeline import Pipeline
from trainer.pipeline.step import PipelineStep
from trainer.step import ShardTransaction, StepOrder, StepResult
from trainer.tokens import Tokens

Rows = Sequence[NDArray[np.integer]]
NextRows = Callable[[], Rows | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ahead:
    step: PipelineStep
    rows: Rows


class PipelineCourse:
    """Makes the steps of one engine; `tokens` checks rows and brings them to the device."""

    def __init__(self, pipeline: Pipeline, tokens: Callable[[Rows], list[Tokens]]) -> None:
        self._pipeline = pipeline
        self._tokens = tokens
        self._ahead: _Ahead | None = None

    def train(
        self, txn: ShardTransaction, order: StepOrder, rows: Rows, next_rows: NextRows | None
    ) -> StepResult | None:
        """Stage a step, sealed; None, with nothing staged, where the plain way has to do it."""
        try:
            step = self._taken(txn, order, rows)
            step.go_back(txn, order)
            if step.may_be_final and next_rows is not None:
                # Before the rest is written: asking for that takes the host long, and the device
                # has nothing to compute meanwhile.
                self._begin_next(step, next_rows)
            step.write_rest()
            result = step.conclude(txn, self._forget_next)
            if result is not None and self._ahead is None and next_rows is not None:
                self._begin_next(step, next_rows)
            with step.sealing():
                self._pipeline.sealer.drain()
            if result is not None:
                result.timings.update(step.timings)
            step.close()
        except BaseException as error:
            self._ahead = None
            self._pipeline.reset()
            if isinstance(error, UnknownLayoutError):
                return None
            raise
        if result is None:
            self._pipeline.reset()
        return result

    def _forget_next(self) -> None:
        """Forget what was begun from updates that are not to be."""
        if self._ahead is not None:
            self._ahead = None
            self._pipeline.forget_begun()

    def _taken(self, txn: ShardTransaction, order: StepOrder, rows: Rows) -> PipelineStep:
        """Give the step that was begun ahead if it is this one, else begin this one."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            if ahead.rows is rows and ahead.step.step == order.step and ahead.step.settle(txn):
                return ahead.step
            self._pipeline.reset()
        step = PipelineStep(self._pipeline, order.step, self._tokens(rows))
        is_settled = step.settle(txn)
        assert is_settled, "a step that begins from a base is settled on it"
        step.begin()
        return step

    def _begin_next(self, step: PipelineStep, next_rows: NextRows) -> None:
        rows = next_rows()
        if rows is None:
            return
        lanes = self._pipeline.lanes
        try:
            # In a lane of their own: elsewhere the host would wait for all that is asked for.
            with lanes.on(Lane.TOKENS_IN, "tokens"):
                tokens = self._tokens(rows)
        except InputError:
            return  # it is told when that step is asked for: this one is good
        lanes.wait(Lane.COMPUTE, lanes.mark(Lane.TOKENS_IN))
        for batch in tokens:
            lanes.hold(batch.ids, Lane.COMPUTE)
            lanes.hold(batch.labels, Lane.COMPUTE)
        ahead = PipelineStep(self._pipeline, step.step + 1, tokens, step)
        ahead.begin()
        self._ahead = _Ahead(step=ahead, rows=rows)
