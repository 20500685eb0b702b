"""Guarded step replay: a step is tried on its own batch before it may be committed.

Owns the order of attempts and their record. Knows nothing of commits or of the next batch. An
attempt is staged, the batch's loss is taken again through what is staged, and a step that made it
clearly worse is discarded, shard by shard, and computed again with the next scales. Invariants:
when `train_guarded` returns, what is staged is the accepted attempt and nothing else; a state whose
loss is not finite is never accepted, whatever is to happen when all attempts fail.

The grad-norm scales lower `max_grad_norm`, so they do nothing where clipping is `none`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trainer.engine import Engine, Rows, StepResult
from trainer.errors import UpdateRejectedError
from trainer.guard_policy import GuardPolicy
from trainer.pipeline.course import NextRows
from trainer.step import ShardTransaction

Record = dict[str, Any]


def train_guarded(
    engine: Engine,
    txn: ShardTransaction,
    micro_batches: Sequence[Rows],
    *,
    step: int,
    learning_rate: float,
    loss_scale: float = 1.0,
    next_rows: NextRows | None = None,
) -> tuple[StepResult, Record | None]:
    """Stage a step that the guard lets pass; give its record, None when there is no guard.

    Raises:
        UpdateRejectedError: no attempt passed and the policy is to skip; everything is discarded.
    """
    policy = engine.options.guard
    record: Record = {}
    guarding_seconds = 0.0
    for attempt in range(policy.attempts_max if policy else 1):
        rate_scale, norm_scale = policy.scales(attempt) if policy else (1.0, 1.0)
        began = time.perf_counter()
        result = engine.train_step(
            txn,
            micro_batches,
            step=step,
            learning_rate=learning_rate * rate_scale,
            loss_scale=loss_scale,
            grad_norm_scale=norm_scale,
            next_rows=None if policy else next_rows,  # what is tried may be discarded
        )
        if policy is None:
            return result, None
        trained = time.perf_counter()
        loss_after = engine.evaluate(txn, micro_batches).loss
        _note_attempt(record, policy, result.loss, loss_after, attempt)
        if record["accepted"] or _is_last_resort(policy, attempt, loss_after):
            guarding_seconds += time.perf_counter() - trained
            return _timed(result, guarding_seconds), record
        engine.discard_step(txn)
        guarding_seconds += time.perf_counter() - began
    raise UpdateRejectedError(
        f"no attempt of {record['attempts']} passed the guard: the batch's loss rose from"
        f" {record['loss_before']:.4f} to {loss_after:.4f} at the last one",
        details=record,
    )


def _timed(result: StepResult, seconds: float) -> StepResult:
    """Add what guarding took: every look at a staged step, and the attempts that were dropped."""
    return replace(result, timings={**result.timings, "guard_replay_seconds": seconds})


def _is_last_resort(policy: GuardPolicy, attempt: int, loss_after: float) -> bool:
    """Whether all attempts failed and the last one is to be taken all the same."""
    is_last = attempt + 1 == policy.attempts_max
    return is_last and policy.on_exhaust == "accept" and math.isfinite(loss_after)


def _note_attempt(
    record: Record, policy: GuardPolicy, loss_before: float, loss_after: float, attempt: int
) -> None:
    rate_scale, norm_scale = policy.scales(attempt)
    accepted = policy.accepts(loss_before, loss_after)
    # A record is JSON in the end, which has no word for NaN.
    after = loss_after if math.isfinite(loss_after) else None
    scales = {"lr_scale": rate_scale, "grad_norm_scale": norm_scale}
    tried = [*record.get("tried", ()), {**scales, "loss_after": after, "accepted": accepted}]
    record.update(
        active=True,
        accepted=accepted,
        attempts=attempt + 1,
        loss_before=loss_before,
        loss_after=after,
        accepted_loss_after=after if accepted else None,
        accepted_lr_scale=rate_scale if accepted else None,
        accepted_grad_norm_scale=norm_scale if accepted else None,
        tried=tried,
    )
