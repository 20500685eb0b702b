"""The course of one step through the pipeline.

Owns the order: forward, head, replay, updates, and what clipping does to that order. Knows slots
and lanes, a transaction, and stages. Computes what `trainer.step.TrainStep` computes, bit for bit;
where it cannot, `run` says so and leaves nothing staged.

Clipping by the model's norm is exact without a second pass over the data. When the step before was
not clipped, updates are made as gradients come, as if this one were not either; every gradient
waits in the bank meanwhile. If the norm then is above the limit, what was staged is dropped and
each update made again from the base, with the scale. After a clipped step updates wait for the
norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.clipping import total_norm
from trainer.device_lanes import Lane
from trainer.gradients import PlacedSum
from trainer.head import head_backward
from trainer.model.stages import Stage
from trainer.pipeline.feeding import BaseImages, Brought, Parameters, StateTiles
from trainer.pipeline.pipeline import Pipeline
from trainer.pipeline.slots import Slot
from trainer.pipeline.updating import TileTensors, Updates
from trainer.step import ShardTransaction, StepOrder, StepResult
from trainer.timing import StepClock
from trainer.tokens import Tokens


@dataclass(kw_only=True)
class _Found:
    """What a step measures on the device, read once at its end."""

    norms: dict[str, Tensor]
    loss_sum: Tensor | None = None


class PipelineStep:
    """One step; `run` stages the next version of every shard, or nothing."""

    def __init__(self, pipeline: Pipeline, txn: ShardTransaction, order: StepOrder) -> None:
        model = pipeline.model
        self._pipeline = pipeline
        self._model = model
        self._txn = txn
        self._order = order
        self._lanes = pipeline.lanes
        self._clock = StepClock()
        self._compute = model.compute(self._clock)
        self._max_norm = model.options.max_grad_norm * order.grad_norm_scale
        self._mode = model.options.grad_clip_mode
        self._updates_at_once = self._mode != "global" or not pipeline.clipped_last
        self._scales: dict[str, Tensor] = {}
        self._found = _Found(norms={})
        self._base = BaseImages(txn, pipeline.shapes, pipeline.images)
        self._backward = [stage.name for stage in reversed(model.owners())]
        self._tied_sum: tuple[Slot, PlacedSum] | None = None

    def run(self, batches: Sequence[Tokens]) -> StepResult | None:
        """Do the whole step; None, with nothing staged, when a loss or gradient is not finite."""
        self._pipeline.reset()
        try:
            return self._run(batches)
        except BaseException:
            self._pipeline.settle()
            raise

    def _run(self, batches: Sequence[Tokens]) -> StepResult | None:
        self._begin()
        with self._clock.measure("forward_kernel_seconds"):
            hidden = self._forward(batches)
        with self._clock.measure("head_kernel_seconds"):
            gradients = self._head(hidden, batches)
        with self._clock.measure("backward_kernel_seconds"):
            self._replay(batches, gradients)
        with self._clock.measure("optimizer_math_seconds"):
            told = self._read()
            if not told.is_finite:
                self._drop()
                self._pipeline.settle()
                return None
            clipped = self._mode == "global" and told.scale < 1.0
            if clipped and self._updates_at_once:
                self._drop()
            if self._mode == "global" and (clipped or not self._updates_at_once):
                self._update_from_bank()
            self._pipeline.clipped_last = clipped
        with self._clock.measure("optimizer_save_stage_seconds"):
            self._pipeline.sealer.drain()
        self._end()
        return self._result(told, batches)

    # The passes

    def _begin(self) -> None:
        pipeline, order = self._pipeline, self._order
        for name in self._backward:  # one that lies otherwise is met before anything is staged
            self._base.view(f"params/{name}")
            self._base.view(f"optim/{name}")
        pipeline.step_number.fill_(float(order.step))
        self._bring_residents()
        trunk = [stage.name for stage in self._model.trunk]
        again = list(reversed(trunk))
        self._params = self._feed([*trunk, self._model.head.name, *again])
        self._updates = self._open_updates()
        self._lanes.wait(Lane.UPDATE, self._lanes.mark(Lane.COMPUTE))

    def _bring_residents(self) -> None:
        """Bring resident stages in again where they do not hold the base."""
        for name, resident in self._pipeline.residents.items():
            params, state = self._base.view(f"params/{name}"), self._base.view(f"optim/{name}")
            if not resident.holds(self._order.step - 1, params, state):
                resident.step = None
                self._lanes.wait(Lane.PARAMS_IN, self._lanes.mark(Lane.COMPUTE))
                with self._lanes.on(Lane.PARAMS_IN, f"resident {name}"):
                    resident.params.copy_(self._base.elements(f"params/{name}"), non_blocking=True)
                    resident.state.copy_(self._base.elements(f"optim/{name}"), non_blocking=True)
                self._lanes.wait(Lane.COMPUTE, self._lanes.mark(Lane.PARAMS_IN))

    def _feed(self, order: Sequence[str]) -> Parameters:
        pipeline = self._pipeline
        return Parameters(self._lanes, self._base, pipeline.params, pipeline.residents, order)

    def _open_updates(self) -> Updates:
        pipeline = self._pipeline
        order = [(name, pipeline.shapes[name]) for name in self._backward]
        return Updates(
            lanes=self._lanes,
            base=self._base,
            images=pipeline.images,
            tiles=StateTiles(self._lanes, self._base, pipeline.tiles, pipeline.residents, order),
            sealer=pipeline.sealer,
            txn=self._txn,
            shapes=pipeline.shapes,
            residents=pipeline.residents,
            apply=self._apply,
            step=self._order.step,
        )

    def _forward(self, batches: Sequence[Tokens]) -> list[Tensor]:
        """Pass every micro-batch through every stage; give the last stage's outputs."""
        hidden = [batch.ids for batch in batches]
        last = len(self._model.trunk) - 1
        for index, stage in enumerate(self._model.trunk):
            brought = self._params.next(stage.name)
            weights = self._weights(stage, brought)
            with torch.no_grad(), self._lanes.on(Lane.COMPUTE, f"forward {stage.name}"):
                for batch, x in enumerate(hidden):
                    hidden[batch] = self._compute.run(stage, weights, x)
                    if index < last:
                        self._pipeline.boundaries.keep(index, batch, hidden[batch])
            self._params.give_back(brought, Lane.COMPUTE)
        return hidden

    def _head(self, hidden: list[Tensor], batches: Sequence[Tokens]) -> list[Tensor]:
        """Take the loss and its gradients; update the head, unless it shares its weight."""
        model, head = self._model, self._model.head
        replayed = range(len(model.trunk) - 1, 0, -1)
        self._pipeline.boundaries.begin_replay(
            [(index - 1, batch) for index in replayed for batch in range(len(batches))]
        )
        self._updates.tiles.fetch()
        brought = self._params.next(head.name)
        slot, total = self._open_sum(head.name)
        with self._lanes.on(Lane.COMPUTE, f"head {head.name}"):
            found = head_backward(
                head,
                self._weights(head, brought),
                hidden,
                [batch.labels for batch in batches],
                valid_tokens=sum(batch.valid_count for batch in batches),
                chunk_tokens=model.options.lm_head_chunk_tokens,
                total=total,
            )
        self._found.loss_sum = found.loss_sum
        hidden.clear()
        if model.tied:
            self._tied_sum = (slot, total)
            self._params.give_back(brought, Lane.COMPUTE)
        else:
            self._finish(head.name, brought, slot, total)
        return list(found.hidden)

    def _replay(self, batches: Sequence[Tokens], gradients: list[Tensor]) -> None:
        """Compute each stage again from what went into it, and go back through it."""
        boundaries = self._pipeline.boundaries
        for index in range(len(self._model.trunk) - 1, -1, -1):
            stage = self._model.trunk[index]
            brought = self._params.next(stage.name)
            slot, total = self._tied_sum if self._tied_sum and index == 0 else (None, None)
            if slot is None or total is None:
                slot, total = self._open_sum(stage.name)
            leaves = {
                name: tensor.detach().requires_grad_()
                for name, tensor in self._weights(stage, brought).items()
            }
            with self._lanes.on(Lane.COMPUTE, f"backward {stage.name}"):
                for batch in range(len(batches)):
                    x = batches[batch].ids if index == 0 else boundaries.take(index - 1, batch)
                    gradients[batch] = self._back(stage, leaves, x, gradients[batch], total)
                    if index > 0:
                        boundaries.done()
            self._finish(stage.name, brought, slot, total)

    def _back(
        self,
        stage: Stage,
        leaves: Mapping[str, Tensor],
        x: Tensor,
        gradient: Tensor,
        total: PlacedSum,
    ) -> Tensor:
        leaf = x.detach().requires_grad_(x.is_floating_point())
        with torch.enable_grad():
            output = self._compute.run(stage, leaves, leaf)
        wanted = [*leaves.values(), *([leaf] if leaf.requires_grad else [])]
        found = torch.autograd.grad(output, wanted, grad_outputs=gradient)
        total.add(dict(zip(leaves, found, strict=False)))
        return found[-1] if leaf.requires_grad else gradient

    # Parts of the passes

    def _weights(self, stage: Stage, brought: Brought) -> dict[str, Tensor]:
        """Give a stage's parameters as it computes with them."""
        shape = self._pipeline.shapes[stage.name]
        if stage.keeps_master_dtype:
            return shape.image_views(brought.buffer)
        weights = self._pipeline.weights
        if shape.is_aligned:
            count = shape.params.count
            weights[:count].copy_(brought.buffer[:count])
            return shape.views(weights)
        cast = shape.views(weights)
        for name, tensor in shape.image_views(brought.buffer).items():
            cast[name].copy_(tensor)
        return cast

    def _open_sum(self, name: str) -> tuple[Slot, PlacedSum]:
        slot = self._pipeline.gradients.take(Lane.COMPUTE)
        return slot, PlacedSum(self._pipeline.shapes[name].views(slot.buffer))

    def _finish(self, name: str, brought: Brought, slot: Slot, total: PlacedSum) -> None:
        """Take a stage's norms, then update it now, or bank its gradients for later."""
        pipeline, shape = self._pipeline, self._pipeline.shapes[name]
        norms = torch.stack(list(torch._foreach_norm(list(total.gradients.values()), 2.0)))
        self._found.norms[name] = norms
        if self._mode == "global":
            pipeline.bank.keep(name, shape, slot.buffer, half=total.fits_half)
        if not self._updates_at_once:
            self._params.give_back(brought, Lane.COMPUTE)
            pipeline.gradients.give_back(slot, pipeline.bank.lane)
            return
        if self._mode == "shard":
            self._scales[name] = self._scale_of(total_norm([norms]))
            slot.buffer[: shape.count].mul_(self._scales[name])
        self._updates.update(brought, slot.buffer, self._lanes.mark(Lane.COMPUTE))
        self._params.give_back(brought, Lane.OUT)
        pipeline.gradients.give_back(slot, Lane.UPDATE)

    def _update_from_bank(self) -> None:
        """Update every stage from the base with gradients that are known and scaled."""
        pipeline, scale = self._pipeline, self._scales["model"]
        if self._updates_at_once:
            self._bring_residents()
            self._updates = self._open_updates()
        self._params = self._feed(self._backward)
        self._updates.tiles.fetch()
        for name in self._backward:
            brought = self._params.next(name)
            shape = pipeline.shapes[name]
            slot = pipeline.gradients.take(Lane.UPDATE)
            pipeline.bank.bring(name, shape, slot.buffer)
            with self._lanes.on(Lane.UPDATE):
                slot.buffer[: shape.count].mul_(scale)
            self._updates.update(brought, slot.buffer, None)
            self._params.give_back(brought, Lane.OUT)
            pipeline.gradients.give_back(slot, Lane.UPDATE)

    def _drop(self) -> None:
        """Drop what an update staged that should not have been made."""
        self._pipeline.sealer.drain()
        self._lanes.arrive(self._lanes.mark(Lane.OUT, for_host=True))
        if self._updates_at_once:
            for name in self._backward:
                for kind in ("params", "optim"):
                    self._txn.discard(f"{kind}/{name}")
        for resident in self._pipeline.residents.values():
            resident.step = None

    def _apply(self, tile: TileTensors) -> None:
        self._pipeline.rule.apply(
            tile.params,
            tile.gradients,
            tile.states,
            decayed=tile.decayed,
            step=self._pipeline.step_number,
            learning_rate=self._order.learning_rate,
        )

    def _scale_of(self, norm: Tensor) -> Tensor:
        return torch.clamp(self._max_norm / (norm + 1e-6), max=1.0)

    # The end

    def _read(self) -> _Told:
        """Wait for the device's last gradient; read loss, norms and scales in one copy."""
        names = [stage.name for stage in self._model.owners()]
        norms = [self._found.norms[name] for name in names]
        norm = total_norm(norms)
        if self._mode == "global":
            self._scales["model"] = self._scale_of(norm)
        scales = [*self._scales.values()] or [torch.ones_like(norm)]
        shard_norms = [total_norm([each]) for each in norms]
        finite = torch.isfinite(torch.cat(norms)).all()
        loss_sum = self._found.loss_sum
        assert loss_sum is not None
        told = torch.stack([finite.double(), loss_sum, norm.double()])
        told = torch.cat([told, torch.stack(scales).double(), torch.stack(shard_norms).double()])
        values = told.tolist()
        scale_values = values[3 : 3 + len(scales)]
        return _Told(
            is_finite=bool(values[0]) and math.isfinite(values[1]),
            loss_sum=values[1],
            norm=values[2],
            scale=min(scale_values),
            shard_norms=dict(zip(names, values[3 + len(scales) :], strict=True)),
        )

    def _end(self) -> None:
        pipeline = self._pipeline
        pipeline.steps_done += 1
        if pipeline.settings.vram_budget_bytes is not None:
            # The first step compiles; what the second one took at its fullest is what others take.
            if pipeline.steps_done == 1:
                self._model.device.forget_peak()
            elif pipeline.steps_done == 2:
                pipeline.fill_budget()

    def _result(self, told: _Told, batches: Sequence[Tokens]) -> StepResult:
        valid_tokens = sum(batch.valid_count for batch in batches)
        return StepResult(
            loss=told.loss_sum / valid_tokens,
            grad_norm=told.norm,
            clip_scale=told.scale,
            tokens=sum(batch.ids.numel() for batch in batches),
            valid_tokens=valid_tokens,
            updated_shards=len(self._backward),
            max_active_param_shards=len(self._pipeline.params) + len(self._pipeline.residents),
            max_active_optimizer_shards=len(self._pipeline.tiles) + len(self._pipeline.residents),
            shard_norms=told.shard_norms,
            timings=dict(self._clock.seconds),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Told:
    """What the host learned of a step."""

    is_finite: bool
    loss_sum: float
    norm: float
    scale: float
    shard_norms: dict[str, float]
