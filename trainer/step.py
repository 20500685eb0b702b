"""The course of one training step over a transaction.

Owns the order: forward trace, head, reverse replay, clipping, updates, staging. Knows stages, an
optimizer and a transaction; nothing of files, schedules, data order or commits.
Invariants: every shard is staged exactly once; without read-ahead at most one parameter shard and
one optimizer shard are active at a time, and the counts say so.

With clip mode `global` no update can start before the last gradient is known: gradients wait in
host memory, in fp32, and each shard is brought in once more for its update. Otherwise a shard is
updated while it is still in from its replay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardb import TensorSpec, torch_adaptor
from shardb.views import ShardView, StagedShard
from trainer.backward import StageGradients, replay_backward
from trainer.clipping import clip_scale, tensor_norms, total_norm
from trainer.device import Device
from trainer.errors import NonFiniteError
from trainer.forward import bring_in, trace_forward
from trainer.head import HeadGradients, head_backward
from trainer.model.stages import Stage
from trainer.optimizers.rule import UpdateRule
from trainer.optimizers.tiles import ShardUpdate
from trainer.options import EngineOptions
from trainer.prefetch import prefetch_of
from trainer.residency import ShardReader, ShardWindow
from trainer.tape import Compute, Tape
from trainer.timing import StepClock
from trainer.tokens import Tokens


class ShardTransaction(ShardReader, Protocol):
    """The part of a transaction that a step uses."""

    def stage(self, name: str, like: ShardView | Mapping[str, TensorSpec]) -> StagedShard:
        """Give the writable image of a shard of the next commit."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StepModel:
    """What stays the same from step to step."""

    trunk: Sequence[Stage]
    head: Stage
    tied: bool
    options: EngineOptions
    optimizer: UpdateRule
    device: Device

    def compute(self, clock: StepClock) -> Compute:
        """Give where and how stages run, timed by `clock`."""
        return Compute(device=self.device, dtype=self.options.torch_dtype, clock=clock)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step did. Norms are taken before clipping; `clip_scale` is the smallest one applied.

    tokens: positions passed through the model; valid_tokens: those that counted in the loss.
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


class TrainStep:
    """One step: `run` stages the next version of every shard."""

    def __init__(
        self, model: StepModel, txn: ShardTransaction, *, step: int, learning_rate: float
    ) -> None:
        self._model = model
        self._txn = txn
        self._step = step
        self._learning_rate = learning_rate
        self._clock = StepClock(model.device.wait if model.options.timing_sync_cuda else None)
        self._compute = model.compute(self._clock)
        self._loss = 0.0
        self._norms: dict[str, Tensor] = {}
        self._scales: list[float] = []
        self._window = ShardWindow(
            txn,
            _shard_order(model),
            prefetch=prefetch_of(model.options, model.device),
            clock=self._clock,
        )

    def run(self, batches: Sequence[Tokens]) -> StepResult:
        """Do the whole step on `batches`, which hold at least one label that counts."""
        with self._window:
            ids = [batch.ids for batch in batches]
            tapes = trace_forward(
                self._model.trunk,
                self._window,
                self._compute,
                ids,
                keep_activations=self._model.options.activations == "keep",
            )
            if self._model.options.grad_clip_mode == "global":
                self._update_after_last(self._replay(tapes, batches))
            else:
                for ready in self._replay(tapes, batches):
                    self._update(ready, self._shard_scale(self._norms[ready.stage.name]))
        self._model.device.wait()
        return self._result(batches)

    def _replay(self, tapes: list[Tape], batches: Sequence[Tokens]) -> Iterator[StageGradients]:
        """Yield every shard's gradients, their norms taken, from the head to the embeddings."""
        model = self._model
        with self._window.take(f"params/{model.head.name}") as view:
            found = self._head(view, tapes, batches)
            if not model.tied:
                yield self._measured(model.head, view, found.params)
        start = found.params if model.tied else None
        for ready in replay_backward(
            model.trunk, self._window, self._compute, tapes, found.hidden, start
        ):
            yield self._measured(ready.stage, ready.view, ready.gradients)

    def _head(self, view: ShardView, tapes: list[Tape], batches: Sequence[Tokens]) -> HeadGradients:
        params = bring_in(self._model.head, view, self._compute)
        valid_tokens = sum(batch.valid_count for batch in batches)
        with self._clock.measure("head_kernel_seconds"):
            found = head_backward(
                self._model.head,
                params,
                tapes[-1].outputs,
                [batch.labels for batch in batches],
                valid_tokens=valid_tokens,
                chunk_tokens=self._model.options.lm_head_chunk_tokens,
            )
        self._loss = float(found.loss_sum) / valid_tokens
        if not math.isfinite(self._loss):
            raise _diverged(self._model.trunk, tapes, self._loss)
        tapes[-1].outputs.clear()
        return found

    def _measured(
        self, stage: Stage, view: ShardView, gradients: dict[str, Tensor]
    ) -> StageGradients:
        self._norms[stage.name] = tensor_norms(f"params/{stage.name}", gradients)
        return StageGradients(stage=stage, view=view, gradients=gradients)

    def _shard_scale(self, norms: Tensor) -> float:
        if self._model.options.grad_clip_mode == "none":
            return 1.0
        return clip_scale(total_norm([norms]), self._model.options.max_grad_norm)

    def _update_after_last(self, replay: Iterator[StageGradients]) -> None:
        """Hold gradients back until the model's norm is known, then bring each shard in again."""
        waiting: list[tuple[Stage, dict[str, Tensor]]] = []
        for ready in replay:
            with self._clock.measure("gradient_cpu_copy_seconds"):
                held = {n: self._model.device.to_host(g) for n, g in ready.gradients.items()}
            waiting.append((ready.stage, held))
        scale = clip_scale(self._model_norm(), self._model.options.max_grad_norm)
        waiting.reverse()
        while waiting:
            stage, gradients = waiting.pop()
            with self._window.take(f"params/{stage.name}") as view:
                ready = StageGradients(stage=stage, view=view, gradients=gradients)
                self._update(ready, scale)

    def _update(self, ready: StageGradients, scale: float) -> None:
        """Stage the shard's next parameters and state; they are written out from here on."""
        name = ready.stage.name
        self._scales.append(scale)
        with self._window.take(f"optim/{name}") as state_view:
            params = self._stage(f"params/{name}", ready.view, "param_save_stage_seconds")
            state = self._stage(f"optim/{name}", state_view, "optimizer_save_stage_seconds")
            with self._clock.measure("optimizer_math_seconds"):
                self._model.optimizer.update(
                    self._model.device,
                    ShardUpdate(
                        params=torch_adaptor.tensors(ready.view),
                        state=torch_adaptor.tensors(state_view),
                        new_params=torch_adaptor.tensors(params),
                        new_state=torch_adaptor.tensors(state),
                        gradients=ready.gradients,
                        gradient_scale=scale,
                        learning_rate=self._learning_rate,
                        step=self._step,
                    ),
                )
                self._model.device.wait()
            self._seal(params, "param_save_stage_seconds")
            self._seal(state, "optimizer_save_stage_seconds")

    def _stage(self, name: str, like: ShardView, bucket: str) -> StagedShard:
        with self._clock.measure(bucket), self._window.lock:
            return self._txn.stage(name, like=like)

    def _seal(self, staged: StagedShard, bucket: str) -> None:
        with self._clock.measure(bucket), self._window.lock:
            staged.seal()

    def _model_norm(self) -> Tensor:
        """Give the norm over the model, tensors in forward order."""
        names = [stage.name for stage in _owners(self._model)]
        return total_norm([self._norms[name] for name in names])

    def _result(self, batches: Sequence[Tokens]) -> StepResult:
        shards = {stage.name: self._norms[stage.name] for stage in _owners(self._model)}
        return StepResult(
            loss=self._loss,
            grad_norm=float(self._model_norm()),
            clip_scale=min(self._scales),
            tokens=sum(batch.ids.numel() for batch in batches),
            valid_tokens=sum(batch.valid_count for batch in batches),
            updated_shards=len(self._scales),
            max_active_param_shards=self._window.active_max["params"],
            max_active_optimizer_shards=self._window.active_max["optim"],
            shard_norms={name: float(total_norm([norms])) for name, norms in shards.items()},
            timings=dict(self._clock.seconds),
        )


def _owners(model: StepModel) -> list[Stage]:
    """Give the stages that own shards, in forward order."""
    return [*model.trunk] if model.tied else [*model.trunk, model.head]


def _shard_order(model: StepModel) -> list[str]:
    """Give the shards of a step in the order in which `TrainStep` takes them."""
    at_once = model.options.grad_clip_mode != "global"
    backward = list(reversed(_owners(model)))
    order = [f"params/{stage.name}" for stage in model.trunk]
    if model.tied:
        order.append(f"params/{model.head.name}")
    for stage in backward:
        order.append(f"params/{stage.name}")
        if at_once:
            order.append(f"optim/{stage.name}")
    if not at_once:
        order += [f"{kind}/{stage.name}" for stage in backward for kind in ("params", "optim")]
    return order


def _diverged(trunk: Sequence[Stage], tapes: list[Tape], loss: float) -> NonFiniteError:
    """Name the first stage whose output is not finite."""
    for stage, tape in zip(trunk, tapes, strict=True):
        if not all(bool(torch.isfinite(x).all()) for x in tape.outputs):
            return NonFiniteError(
                f"the loss is {loss}: the first values that are not finite leave {stage.name}; "
                "nothing was committed; resume with a lower --learning-rate",
                shard=f"params/{stage.name}",
                tensor="output",
            )
    return NonFiniteError(
        f"the loss is {loss}, from finite inputs of the head; nothing was committed; resume with a "
        "lower --learning-rate",
        shard="params/lm_head",
        tensor="logits",
    )
