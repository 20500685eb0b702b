"""The loop of a run: one step, one transaction, one line.

Owns the order inside a step: batches, gradients and update staged, validation through what is
staged, commit, then the step log and the screen. Knows nothing of flags or of how the engine
computes. Invariants: what is logged or shown is committed; the batches of a step depend on the seed
and the rows consumed alone; the step after a stop signal is never begun.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardb import Commit, Transaction
from shardb.errors import ConflictError
from trainer.adoption import is_import
from trainer.ceiling import Ceiling, keep_beaten
from trainer.data.batches import batch_at
from trainer.engine import Engine, StepResult
from trainer.errors import GradientOverflowError, NonFiniteError, UpdateRejectedError
from trainer.forecast_check import ForecastCheck
from trainer.guard import train_guarded
from trainer.host_memory import resident_bytes
from trainer.lora.forecast import step_operations
from trainer.metering import MeteredTransaction
from trainer.pins import pins_of
from trainer.plan import Plan
from trainer.progress import Progress
from trainer.recipe_build import Changes
from trainer.run_shards import Cursor, line_of, state_of, write_meta
from trainer.scalar_writer import ScalarWriter
from trainer.scaler import scaler_of
from trainer.signals import StopRequest
from trainer.skips import SkipReason, Skips, explained
from trainer.step import ShardTransaction
from trainer.step_log import StepLog
from trainer.tiers import Tiers
from trainer.tracing import RunTrace
from trainer.validation import validation_of
from trainer.watchdog import Watchdog

Ids = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class RunLogs:
    """Where the lines of a run's steps go, and the folder of what is kept beside them."""

    folder: Path
    step_log: StepLog
    scalars: ScalarWriter | None

    def append(self, line: Mapping[str, Any]) -> None:
        """Write the line of a committed step."""
        self.step_log.append(line)
        if self.scalars is not None:
            self.scalars.append(line)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trained:
    """A step that is staged: its metrics, where its time went, bytes moved one way at most."""

    metrics: dict[str, Any]
    timings: dict[str, float]
    moved_bytes: int


@dataclass(kw_only=True)
class Run:
    """A run that is ready to step; `head` is its newest commit, `cursor` where the next begins."""

    plan: Plan
    tiers: Tiers
    engine: Engine
    ceiling: Ceiling
    head: Commit
    cursor: Cursor
    unrecorded: Changes
    progress: Progress
    logs: RunLogs
    watchdog: Watchdog
    request: StopRequest
    trace: RunTrace | None = None
    forecast: ForecastCheck | None = None

    def __post_init__(self) -> None:
        plan = self.plan
        self._validation = validation_of(
            plan.inputs.validation_rows, plan.recipe.micro_batch_size, plan.settings
        )
        self._skips = Skips(plan.settings.max_skipped_steps)
        self._rows_ahead: tuple[int, list[Ids]] | None = None
        self._has_beaten_ceiling = False
        self._commit_seconds = 0.0  # of the last step: its commit, and pins and copies after it

    def is_finished(self) -> bool:
        """Say whether the stop is reached."""
        stop = self.plan.settings.max_steps
        return stop is not None and self.head.step >= stop

    def go_on(self) -> None:
        """Step until the stop is reached or a signal asks to end."""
        self.keep_head()
        while not self.is_finished() and self.request.stop_signal is None:
            line = self.step()
            for reason in self.engine.device.page_locks.reasons():
                self.progress.note(reason)
            if line is not None:
                self.logs.append(line)
                self.progress.step(line)
            self._say_forecast(is_end=False)
        self._say_forecast(is_end=True)

    def _say_forecast(self, *, is_end: bool) -> None:
        said = self.forecast.said(is_end=is_end) if self.forecast is not None else None
        if said is not None:
            self.progress.note(said)

    def keep_head(self) -> float:
        """Pin and publish the newest commit as the settings ask; give the seconds waited."""
        return self.tiers.keep(self.head, pins_of(self.head, self.plan.settings, self.tiers.branch))

    def step(self) -> dict[str, Any] | None:
        """Train and commit one step; give its line of the step log, None if it was skipped."""
        try:
            line = self._step()
            return line if self.forecast is None else line | self.forecast.after(line)
        except (GradientOverflowError, UpdateRejectedError) as reason:
            self._skip(reason)
            return None
        except NonFiniteError as error:
            raise explained(error, self.plan.recipe.dtype, self._diagnose) from error

    def _step(self) -> dict[str, Any]:
        started = time.perf_counter()
        publish_seconds = self.tiers.ready(self.head)
        with self.tiers.training.begin(self.tiers.branch) as txn:
            self._check_base(txn)
            metered = MeteredTransaction(txn)
            trained = self._train(txn, metered, started)
            pending_writes = self.tiers.training.writer.pending
            commit_started = time.perf_counter()
            self._commit(txn, trained.metrics)
        commit_ended = time.perf_counter()
        commit_seconds = commit_ended - commit_started
        if self.trace is not None:
            self.trace.committed(self.head.step, commit_started, commit_ended)
        publish_seconds += self.keep_head()
        seconds = time.perf_counter() - started
        self._commit_seconds = seconds - (commit_started - started)
        return {
            **line_of(self.head, durable_step=self.tiers.durable_step),
            "seconds": seconds,
            "tokens_per_second": trained.metrics["tokens"] / seconds,
            "ceiling_percent": self._ceiling_percent(trained, seconds),
            "commit_seconds": commit_seconds,
            "pending_writes": pending_writes,
            "publish_pending": self.tiers.publish_pending,
            "publish_seconds": publish_seconds,
            "bytes_read": metered.bytes_read,
            "bytes_written": metered.bytes_written,
            "host_memory_bytes": resident_bytes(),
            "device_peak_bytes": self.engine.device.peak_bytes(),
            "timings": trained.timings,
        }

    def _train(self, txn: Transaction, metered: MeteredTransaction, started: float) -> _Trained:
        """Stage the next step of every shard."""
        recipe, step = self.plan.recipe, self.head.step + 1
        shards: ShardTransaction = metered
        if is_import(self.head):
            for said in self.engine.prepare_base(txn):
                self.progress.note(said)
            shards = self.engine.adopting(metered)
            write_meta(txn, recipe, None)
        elif self.unrecorded.keys() - {"position"}:
            write_meta(txn, recipe, None)
        micro_batches = self._rows_now()
        data_seconds = time.perf_counter() - started
        rate = recipe.schedule.learning_rate(
            self.cursor.tokens_seen + recipe.rows_per_step * recipe.seq_len
        )
        scaler = scaler_of(recipe, self.cursor.scaler)
        result, guarded = train_guarded(
            self.engine,
            shards,
            micro_batches,
            step=step,
            learning_rate=rate,
            loss_scale=scaler.scale if scaler else 1.0,
            next_rows=self._next_rows,
        )
        metrics = _metrics_of(result) | self._skips.metrics(step, self.cursor.skipped_steps)
        metrics |= {"guarded_step_replay": guarded} if guarded else {}
        metrics |= {"loss_scale": scaler.scale} if scaler else {}
        metrics |= {
            "learning_rate": rate,
            "tokens_seen": self.cursor.tokens_seen + result.tokens,
            "batch_digest": digest_of(micro_batches),
        }
        moved_bytes, best = max(metered.bytes_read, metered.bytes_written), self.cursor.best
        if self._validation is not None and self._validation.is_due(step):
            # Through what is staged: the loss belongs to the commit that holds it.
            measured, best = self._validation.measure(self.engine, shards, step, best)
            metrics |= measured
        self.cursor = replace(
            self.cursor.past(recipe.rows_per_step),
            tokens_seen=metrics["tokens_seen"],
            scaler=scaler.after_success(recipe.loss_scale_growth_steps).to_json()
            if scaler
            else None,
            best=best,
        )
        if self.unrecorded:
            metrics["recipe_changes"] = {k: list(pair) for k, pair in self.unrecorded.items()}
        # A commit cannot tell how long it will take: the last one stands for it.
        seconds = time.perf_counter() - started + self._commit_seconds
        metrics |= {"seconds": seconds, "tokens_per_second": result.tokens / seconds}
        timings = {**result.timings, "data_load_seconds": data_seconds}
        return _Trained(metrics=metrics, timings=timings, moved_bytes=moved_bytes)

    def _commit(self, txn: Transaction, metrics: Mapping[str, Any]) -> None:
        plan, step = self.plan, self.head.step + 1
        writer, root = self.tiers.training.writer, self.tiers.training.root
        with self.watchdog.watching(
            lambda: (
                f"step {step} waits to be committed: {writer.pending} shards are still to be"
                f" written to {root}"
            )
        ):
            self.head = txn.commit(
                step=step,
                state=state_of(self.cursor, plan.recipe, plan.settings),
                metrics={k: v for k, v in metrics.items() if k != "shard_norms"},
                statistics={name: {"grad_norm": n} for name, n in metrics["shard_norms"].items()},
                recipe_digest=plan.recipe.digest,
            )
        self.unrecorded = {}
        self._skips.clear()

    def _skip(self, reason: SkipReason) -> None:
        """Consume a batch whose step was dropped whole; scale the next one's loss less."""
        recipe, scaler = self.plan.recipe, scaler_of(self.plan.recipe, self.cursor.scaler)
        self._skips.add(self.cursor.position, reason, self._diagnose)
        self.progress.note(f"warning: step {self.head.step + 1}: {reason.message}")
        skipped = replace(
            self.cursor.past(recipe.rows_per_step), skipped_steps=self.cursor.skipped_steps + 1
        )
        if scaler is not None and isinstance(reason, GradientOverflowError):
            skipped = replace(skipped, scaler=scaler.after_overflow().to_json())
        self.cursor = skipped

    def _diagnose(self) -> NonFiniteError | None:
        """Take the gradients of the batch in work again, in fp32, from the last commit."""
        with self.tiers.training.at(commit=self.head.id) as view:
            return self.engine.find_non_finite(view, self._micro_batches(self.cursor.position))

    def _rows_now(self) -> list[Ids]:
        """Give the micro-batches of this step: the very list that was read ahead, if one was."""
        ahead, self._rows_ahead = self._rows_ahead, None
        if ahead is not None and ahead[0] == self.cursor.position:
            return ahead[1]
        return self._micro_batches(self.cursor.position)

    def _next_rows(self) -> list[Ids] | None:
        """Read the micro-batches of the step after this one; None where there will be none."""
        stop = self.plan.settings.max_steps
        is_last = stop is not None and self.head.step + 1 >= stop
        if is_last or self.request.stop_signal is not None:
            return None
        position = self.cursor.position + self.plan.recipe.rows_per_step
        self._rows_ahead = (position, self._micro_batches(position))
        return self._rows_ahead[1]

    def _micro_batches(self, position: int) -> list[Ids]:
        recipe = self.plan.recipe
        rows = recipe.micro_batch_size
        return [
            batch_at(
                self.plan.inputs.rows,
                seed=recipe.seed,
                position=position + index * rows,
                batch_rows=rows,
                shuffle=recipe.shuffle_train,
                row_order="sequential" if recipe.row_order == "sequential" else "shuffled",
                shuffle_buffer_size=recipe.shuffle_buffer_size,
            )
            for index in range(recipe.gradient_accumulation_steps)
        ]

    def _ceiling_percent(self, trained: _Trained, seconds: float) -> float:
        """Compare the step, without its validation, with what the machine could do."""
        work = {
            "flops": step_operations(self.plan.recipe, self.plan.budget.activations),
            "moved_bytes": float(trained.moved_bytes),
            "seconds": seconds - trained.metrics.get("validation_seconds", 0.0),
        }
        percent = self.ceiling.percent(**work)
        if percent <= 100:
            return percent
        self._raise_ceiling(self.ceiling.beaten_by(**work), percent)
        return 100.0

    def _raise_ceiling(self, raised: Ceiling, percent: float) -> None:
        """Raise what was measured too low, say so once, and have the next start measure anew."""
        self.ceiling = raised
        engine = self.engine
        with suppress(OSError):  # it is kept for the next start alone
            keep_beaten(
                raised,
                self.plan.recipe,
                engine.options.torch_dtype,
                engine.device,
                self.logs.folder,
            )
        if not self._has_beaten_ceiling:
            self._has_beaten_ceiling = True
            self.progress.note(
                f"a step took less than the least time by this machine's ceiling ({percent:.0f} %"
                " of it), which was measured too low, as beside other programs: it is raised to"
                " what steps do, a forecast made of it was too low as well, and the next start"
                " measures anew"
            )

    def _check_base(self, txn: Transaction) -> None:
        """Refuse to build on a head that this process did not make."""
        if txn.base is None or txn.base.id != self.head.id:
            raise ConflictError(
                f"branch {self.tiers.branch} moved while this run trained on it; start again to go"
                " on from its new head"
            )


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
    } | ({"global_optimizer": result.normaliser} if result.normaliser else {})
