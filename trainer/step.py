"""The course of one training step over a transaction.

Owns the order: gradients, clipping, updates, staging. Knows stages, an optimizer and a transaction;
nothing of files, schedules, data order or commits. Invariants: every shard is staged exactly once;
without read-ahead at most one parameter shard and one optimizer shard are active at a time, and the
counts say so.

With clip mode `global` no update can start before the last gradient is known: gradients wait in
host memory, in fp32, and each shard is brought in once more for its update. Otherwise a shard is
updated while it is still in from its replay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from shardb import TensorSpec, torch_adaptor
from shardb.views import ShardView, StagedShard
from trainer.backward import StageGradients
from trainer.clipping import clip_scale, total_norm
from trainer.device import Device
from trainer.gradient_pass import GradientPass
from trainer.host_updates import HostUpdates
from trainer.model.stages import Stage
from trainer.normaliser import Normalisation, normalisation
from trainer.optimizers.tiles import ShardUpdate
from trainer.prefetch import prefetch_of
from trainer.residency import ShardReader, ShardWindow
from trainer.step_model import StepModel
from trainer.timing import StepClock
from trainer.tokens import Tokens


class ShardTransaction(ShardReader, Protocol):
    """The part of a transaction that a step uses."""

    def stage(self, name: str, like: ShardView | Mapping[str, TensorSpec]) -> StagedShard:
        """Give the writable image of a shard of the next commit."""
        ...

    def discard(self, name: str) -> None:
        """Drop what is staged of a shard, so that it can be staged again."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOrder:
    """The numbers of one step. grad_norm_scale lowers the norm to which gradients are clipped."""

    step: int
    learning_rate: float
    loss_scale: float = 1.0
    grad_norm_scale: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step did. Norms are taken before clipping; `clip_scale` is the smallest one applied.

    tokens: positions passed through the model; valid_tokens: those that counted in the loss;
    normaliser: what the periodic normaliser did, in a step that it was due.
    """

    loss: float
    grad_norm: float
    clip_scale: float
    tokens: int
    valid_tokens: int
    updated_shards: int
    max_active_param_shards: int
    max_active_optimizer_shards: int
    shard_norms: dict[str, float]
    timings: dict[str, float]
    normaliser: dict[str, Any] | None = None


class TrainStep:
    """One step: `run` stages the next version of every shard."""

    def __init__(self, model: StepModel, txn: ShardTransaction, order: StepOrder) -> None:
        self._model = model
        self._txn = txn
        self._order = order
        self._max_norm = model.options.max_grad_norm * order.grad_norm_scale
        self._clock = StepClock(model.device.wait if model.options.timing_sync_cuda else None)
        self._compute = model.compute(self._clock)
        self._scales: list[float] = []
        self._host = HostUpdates()
        self._window = self._open(model.step_order())

    def run(self, batches: Sequence[Tokens]) -> StepResult:
        """Do the whole step on `batches`, which hold at least one label that counts."""
        self._model.prepare(batches)
        normalised = self._normalisation(batches)
        with self._window, closing(self._host):
            gradients = GradientPass(
                self._model,
                self._window,
                self._compute,
                loss_scale=self._order.loss_scale,
                factors=normalised.factors if normalised else None,
            )
            if self._model.options.grad_clip_mode == "global":
                self._update_after_last(gradients, batches)
            else:
                for ready in gradients.run(batches):
                    self._update(ready, self._shard_scale(gradients.norms[ready.stage.name]))
                    del ready  # while the next stage's are computed nothing holds these
            with self._clock.measure("optimizer_math_seconds"):
                self._host.finish()
        self._model.device.wait()
        return self._result(gradients, batches, normalised)

    def _normalisation(self, batches: Sequence[Tokens]) -> Normalisation | None:
        """In a step where it is due, take the gradients once for their sizes alone."""
        settings = self._model.options.normaliser
        if not settings.is_due(self._order.step):
            return None
        with self._open(self._model.gradient_order()) as window:
            gradients = GradientPass(
                self._model, window, self._compute, loss_scale=self._order.loss_scale
            )
            counts = {
                ready.stage.name: sum(g.numel() for g in ready.gradients.values())
                for ready in gradients.run(batches)
            }
        norms = {n: float(total_norm([gradients.norms[n]])) for n in counts}
        return normalisation(settings, norms, counts)

    def _open(self, order: Sequence[str]) -> ShardWindow:
        prefetch = prefetch_of(self._model.options, self._model.device)
        return ShardWindow(self._txn, order, prefetch=prefetch, clock=self._clock)

    def _shard_scale(self, norms: Tensor) -> float:
        if self._model.options.grad_clip_mode == "none":
            return 1.0
        return clip_scale(total_norm([norms]), self._max_norm)

    def _update_after_last(self, gradients: GradientPass, batches: Sequence[Tokens]) -> None:
        """Hold gradients back until the model's norm is known, then bring each shard in again."""
        waiting: list[tuple[Stage, dict[str, Tensor]]] = []
        for ready in gradients.run(batches):
            with self._clock.measure("gradient_cpu_copy_seconds"):
                held = {n: self._model.device.to_host(g) for n, g in ready.gradients.items()}
            waiting.append((ready.stage, held))
            del ready, held  # on a device, while the next stage's are computed nothing holds these
        scale = clip_scale(gradients.total_norm(), self._max_norm)
        waiting.reverse()
        while waiting:
            stage, held = waiting.pop()
            with self._window.take(f"params/{stage.name}") as view:
                self._update(StageGradients(stage=stage, view=view, gradients=held), scale)

    def _update(self, ready: StageGradients, scale: float) -> None:
        """Stage the shard's next parameters and state; they are written out from here on."""
        name = ready.stage.name
        self._scales.append(scale)
        with self._window.take(f"optim/{name}") as state_view:
            params = self._stage(f"params/{name}", ready.view, "param_save_stage_seconds")
            state = self._stage(f"optim/{name}", state_view, "optimizer_save_stage_seconds")
            if self._model.options.updates_on_host(name):
                self._give_to_host(ready, state_view, params, state, scale)
                return
            with self._clock.measure("optimizer_math_seconds"):
                write_update(self._model, self._order, ready, state_view, params, state, scale)
            self._seal(params, "param_save_stage_seconds")
            self._seal(state, "optimizer_save_stage_seconds")

    def _give_to_host(
        self,
        ready: StageGradients,
        state_view: ShardView,
        params: StagedShard,
        state: StagedShard,
        scale: float,
    ) -> None:
        """Let the shard be updated on the processor while this thread goes on."""
        with self._clock.measure("gradient_cpu_copy_seconds"):
            here = {n: self._model.device.to_host(g) for n, g in ready.gradients.items()}
        ready = StageGradients(stage=ready.stage, view=ready.view, gradients=here)
        update = partial(
            write_update,
            self._model,
            self._order,
            ready,
            state_view,
            params,
            state,
            scale,
            device=Device.from_name("cpu"),
        )

        def work() -> None:
            update()
            with self._window.lock:
                params.seal()
                state.seal()

        with self._clock.measure("optimizer_math_seconds"):
            self._host.give(work)

    def _stage(self, name: str, like: ShardView, bucket: str) -> StagedShard:
        with self._clock.measure(bucket), self._window.lock:
            return self._txn.stage(name, like=like)

    def _seal(self, staged: StagedShard, bucket: str) -> None:
        with self._clock.measure(bucket), self._window.lock:
            staged.seal()

    def _result(
        self,
        gradients: GradientPass,
        batches: Sequence[Tokens],
        normalised: Normalisation | None,
    ) -> StepResult:
        shards = {stage.name: gradients.norms[stage.name] for stage in self._model.owners()}
        return StepResult(
            loss=gradients.loss,
            grad_norm=float(gradients.total_norm()),
            clip_scale=min(self._scales),
            tokens=sum(batch.ids.numel() for batch in batches),
            valid_tokens=sum(batch.valid_count for batch in batches),
            updated_shards=len(self._scales),
            max_active_param_shards=self._window.active_max["params"] + self._host.pending_max,
            max_active_optimizer_shards=self._window.active_max["optim"] + self._host.pending_max,
            shard_norms={name: float(total_norm([norms])) for name, norms in shards.items()},
            timings=dict(self._clock.seconds),
            normaliser=normalised.to_json() if normalised else None,
        )


def write_update(
    model: StepModel,
    order: StepOrder,
    ready: StageGradients,
    state_view: ShardView,
    params: StagedShard,
    state: StagedShard,
    scale: float,
    *,
    device: Device | None = None,
) -> None:
    """Write a shard's next parameters and state, and wait until they are there.

    device: where the update is computed, None for where the step is.
    """
    place = device or model.device
    model.optimizer.update(
        place,
        ShardUpdate(
            name=ready.stage.name,
            params=torch_adaptor.tensors(ready.view),
            state=torch_adaptor.tensors(state_view),
            new_params=torch_adaptor.tensors(params),
            new_state=torch_adaptor.tensors(state),
            gradients=ready.gradients,
            gradient_scale=scale,
            learning_rate=order.learning_rate,
            step=order.step,
        ),
    )
    place.wait()
