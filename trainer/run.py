"""The loop of a run: one step, one transaction, one line.

Owns the order inside a step: batches, gradients and update staged, validation through what is
staged, commit, then the step log and the screen. Knows nothing of flags or of how the engine
computes. Invariants: what is logged or shown is committed; the batches of a step depend on the seed
and the rows consumed alone; the step after a stop signal is never begun.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardb import Commit, Store, Transaction
from shardb.errors import ConflictError, SnapshotExistsError
from trainer.data.batches import batch_at, validation_batches
from trainer.engine import Engine, StepResult
from trainer.inputs import Inputs
from trainer.progress import Progress
from trainer.recipe import Recipe, Settings
from trainer.recipe_build import Changes
from trainer.run_shards import BRANCH, Cursor, line_of, state_of, write_meta
from trainer.signals import StopRequest
from trainer.step_log import StepLog

Ids = NDArray[np.int64]


@dataclass(kw_only=True)
class Run:
    """A run that is ready to step; `head` is its newest commit."""

    store: Store
    engine: Engine
    recipe: Recipe
    settings: Settings
    inputs: Inputs
    head: Commit
    unrecorded: Changes
    progress: Progress
    step_log: StepLog
    request: StopRequest

    def is_finished(self) -> bool:
        """Say whether the stop is reached."""
        return self.settings.max_steps is not None and self.head.step >= self.settings.max_steps

    def go_on(self) -> None:
        """Step until the stop is reached or a signal asks to end."""
        while not self.is_finished() and self.request.stop_signal is None:
            line = self.step()
            self.step_log.append(line)
            self.progress.step(line)

    def step(self) -> dict[str, Any]:
        """Train and commit one step; give its line of the step log."""
        started = time.perf_counter()
        with self.store.begin(BRANCH) as txn:
            self._check_base(txn)
            metrics, timings = self._train(txn, started)
            pending_writes = self.store.writer.pending
            commit_started = time.perf_counter()
            self.head = self._commit(txn, metrics)
        now = time.perf_counter()
        self._pin_snapshot()
        return {
            **line_of(self.head, durable_step=self.store.durable_step(BRANCH) or 0),
            "seconds": now - started,
            "tokens_per_second": metrics["tokens"] / (now - started),
            "commit_seconds": now - commit_started,
            "pending_writes": pending_writes,
            "timings": timings,
        }

    def _train(self, txn: Transaction, started: float) -> tuple[dict[str, Any], dict[str, float]]:
        """Stage the next step of every shard; give its commit's metrics, and where time went."""
        step, cursor = self.head.step + 1, Cursor.of(self.head)
        if self.unrecorded:
            write_meta(txn, self.recipe, None)
        micro_batches = self._micro_batches(cursor)
        data_seconds = time.perf_counter() - started
        step_tokens = self.recipe.rows_per_step * self.recipe.seq_len
        rate = self.recipe.schedule.learning_rate(cursor.tokens_seen + step_tokens)
        result = self.engine.train_step(txn, micro_batches, step=step, learning_rate=rate)
        metrics = _metrics_of(result) | {
            "learning_rate": rate,
            "tokens_seen": cursor.tokens_seen + result.tokens,
            "batch_digest": digest_of(micro_batches),
        }
        if self._validation_is_due(step):
            metrics |= self._validate(txn)
        if self.unrecorded:
            metrics["recipe_changes"] = {k: list(pair) for k, pair in self.unrecorded.items()}
        seconds = time.perf_counter() - started
        metrics |= {"seconds": seconds, "tokens_per_second": result.tokens / seconds}
        return metrics, {**result.timings, "data_load_seconds": data_seconds}

    def _commit(self, txn: Transaction, metrics: Mapping[str, Any]) -> Commit:
        cursor = Cursor(
            position=Cursor.of(self.head).position + self.recipe.rows_per_step,
            tokens_seen=metrics["tokens_seen"],
        )
        commit = txn.commit(
            step=self.head.step + 1,
            state=state_of(cursor, self.recipe, self.settings),
            metrics={k: v for k, v in metrics.items() if k != "shard_norms"},
            statistics={name: {"grad_norm": n} for name, n in metrics["shard_norms"].items()},
            recipe_digest=self.recipe.digest,
        )
        self.unrecorded = {}
        return commit

    def _micro_batches(self, cursor: Cursor) -> list[Ids]:
        rows = self.recipe.micro_batch_size
        return [
            batch_at(
                self.inputs.rows,
                seed=self.recipe.seed,
                position=cursor.position + index * rows,
                batch_rows=rows,
                shuffle=self.recipe.shuffle_train,
            )
            for index in range(self.recipe.gradient_accumulation_steps)
        ]

    def _validation_is_due(self, step: int) -> bool:
        every = self.settings.validate_every
        if self.inputs.validation_rows is None or every == 0:
            return False
        return step % every == 0 or step == self.settings.max_steps

    def _validate(self, txn: Transaction) -> dict[str, Any]:
        """Measure the staged state, so that the loss belongs to the commit that holds it."""
        assert self.inputs.validation_rows is not None
        started = time.perf_counter()
        batches = validation_batches(
            self.inputs.validation_rows,
            self.recipe.micro_batch_size,
            self.settings.max_validation_batches,
        )
        result = self.engine.evaluate(txn, batches)
        return {
            "validation_loss": result.loss,
            "validation_tokens": result.tokens,
            "validation_seconds": time.perf_counter() - started,
        }

    def _check_base(self, txn: Transaction) -> None:
        """Refuse to build on a head that this process did not make."""
        if txn.base is None or txn.base.id != self.head.id:
            raise ConflictError(
                f"branch {BRANCH} moved while this run trained on it; start again to go on from"
                " its new head"
            )

    def _pin_snapshot(self) -> None:
        pin_snapshot(self.store, self.head, self.settings.snapshot_every, self.progress)


def pin_snapshot(store: Store, head: Commit, every: int, progress: Progress) -> None:
    """Pin `head` as `step-N` when its step is a multiple of `every`."""
    if every == 0 or head.step == 0 or head.step % every:
        return
    name = f"step-{head.step}"
    try:
        store.create_snapshot(name, ref=head.id)
    except SnapshotExistsError:
        # The run was rewound past this step and trained again: the older snapshot stays.
        progress.note(f"warning: a snapshot {name} of another commit exists and was left as it is")


def digest_of(micro_batches: list[Ids]) -> str:
    """Give the xxh3-128 of a step's token ids, in hex: equal where a step read the same rows."""
    digest = xxhash.xxh3_128()
    for batch in micro_batches:
        digest.update(np.ascontiguousarray(batch, dtype="<i8").tobytes())
    return digest.hexdigest()


def _metrics_of(result: StepResult) -> dict[str, Any]:
    return {
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "clip_scale": result.clip_scale,
        "tokens": result.tokens,
        "updated_shards": result.updated_shards,
        "max_active_param_shards": result.max_active_param_shards,
        "max_active_optimizer_shards": result.max_active_optimizer_shards,
        "shard_norms": dict(result.shard_norms),
    }
