"""The course of one step through the pipeline.

Owns the order: forward, head, replay, updates, and what clipping does to that order. Knows slots
and lanes, a transaction, and stages. Computes what `trainer.step.TrainStep` computes, bit for bit;
where it cannot, `conclude` says so and leaves nothing staged.

`begin` is the forward pass and the head. It needs no transaction: it may run from what the step
before staged, while that step is still digested and committed. `go_back`, `write_rest` and
`conclude` do the rest inside a transaction; behind the first, the next step may begin.

Clipping by the model's norm is exact without a second pass over the data. When the step before was
not clipped, updates are made as gradients come, as if this one were not either; every gradient
waits in the bank meanwhile. If the norm then is above the limit, what was staged is dropped and
each update made again from the base, with the scale. After a clipped step updates wait for the
norm. Without a bank, to save its memory, gradients are computed a second time where they have to
be scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from trainer.clipping import total_norm
from trainer.device_lanes import Lane, Mark
from trainer.gradients import PlacedSum
from trainer.pipeline.feeding import BaseImages, Brought, Parameters, StateTiles
from trainer.pipeline.gradients import GradientBank
from trainer.pipeline.graphs import HeadWork
from trainer.pipeline.measuring import Told
from trainer.pipeline.pipeline import Pipeline
from trainer.pipeline.slots import Slot
from trainer.pipeline.updating import TileTensors, Updates
from trainer.pipeline.writing import new_writes
from trainer.step import ShardTransaction, StepOrder, StepResult
from trainer.timing import StepClock
from trainer.tokens import Tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class _HeadDone:
    """What the head gave: gradients of its parameters, summed in a slot, and of its inputs."""

    brought: Brought
    slot: Slot
    total: PlacedSum
    loss_sum: Tensor
    gradients: list[Tensor]


class PipelineStep:
    """Step `step` on `batches`; `conclude` stages the next version of every shard, or nothing.

    before: the step before, where this one begins from what that staged, before it is committed.
    """

    _params: Parameters
    _updates: Updates

    def __init__(
        self,
        pipeline: Pipeline,
        step: int,
        batches: Sequence[Tokens],
        before: PipelineStep | None = None,
    ) -> None:
        self.step = step
        self._pipeline = pipeline
        self._model = model = pipeline.model
        self._batches = batches
        self._lanes = pipeline.lanes
        self._clock = StepClock()
        self._compute = model.compute(self._clock)
        self._mode = model.options.grad_clip_mode
        staged = before._updates.writes.staged if before is not None else None
        self._base = BaseImages(pipeline.shapes, pipeline.images, staged=staged)
        self._left_over = before._params.left_over() if before is not None else []
        # What becomes resident while a step is under way is so from the next one on.
        self._residents = dict(pipeline.residents)
        self._names = [stage.name for stage in model.owners()]
        self._backward = list(reversed(self._names))
        self._tied_sum: tuple[Slot, PlacedSum] | None = None
        self._updates_at_once = True
        self._known_scale: Tensor | None = None

    def settle(self, txn: ShardTransaction) -> bool:
        """Take the transaction's base; False where this step began from another one."""
        with self._clock.measure("param_load_seconds"):
            return self._base.settle(txn)

    @contextmanager
    def sealing(self) -> Iterator[None]:
        """Count the wait for copies out and digests."""
        with self._clock.measure("param_save_stage_seconds"):
            yield

    @property
    def timings(self) -> Mapping[str, float]:
        """Give seconds by bucket."""
        return self._clock.seconds

    def begin(self) -> None:
        """Ask for the forward pass and the head."""
        # What is on the device already is as the step before leaves it.
        self._lanes.wait(Lane.COMPUTE, self._lanes.mark(Lane.UPDATE))
        self._bring_residents()
        trunk = [stage.name for stage in self._model.trunk]
        self._params = self._feed(
            [*trunk, self._model.head.name, *reversed(trunk)], self._left_over
        )
        self._left_over = []
        with self._clock.measure("forward_kernel_seconds"):
            hidden = self._forward()
        with self._clock.measure("head_kernel_seconds"):
            self._head_done = self._head(hidden)

    @property
    def may_be_final(self) -> bool:
        """Say whether `go_back` asked for updates that stay unless the norm is above the limit."""
        return self._updates_at_once

    def go_back(self, txn: ShardTransaction, order: StepOrder) -> None:
        """Do the replay, with the updates that need not wait; the base is settled."""
        assert order.step == self.step
        self._order = order
        max_norm = self._model.options.max_grad_norm * order.grad_norm_scale
        self._measures = self._pipeline.new_measures(max_norm)
        self._updates_at_once = self._mode != "global" or not self._pipeline.clipped_last
        self._pipeline.step_number.fill_(float(order.step))
        self._lanes.wait(Lane.UPDATE, self._lanes.mark(Lane.COMPUTE))
        self._updates = self._open_updates(txn)
        with self._clock.measure("backward_kernel_seconds"):
            self._replay()
        clips_model = self._mode == "global"
        self._measures.send(self._names, self._lanes, clips_model=clips_model)

    def write_rest(self) -> None:
        """Ask for the copies out that were held back: behind the next step's forward pass."""
        with self._clock.measure("backward_kernel_seconds"):
            self._updates.writes.flush()

    def conclude(self, txn: ShardTransaction, again: Callable[[], None]) -> StepResult | None:
        """Read loss and norms, and make what updates are missing; None when one is not finite.

        Every update is asked for when this returns; what the sealer was given may be on its way.
        again: called before updates that were made are dropped.
        """
        with self._clock.measure("backward_kernel_seconds"):
            told = self._measures.read(self._names, self._lanes)
        if not told.is_finite:
            again()
            self._drop(txn)
            return None
        with self._clock.measure("optimizer_math_seconds"):
            self._clip(txn, told, again)
        self._pipeline.count_step()
        return self._result(told)

    def close(self) -> None:
        """Let go of the base, so that a commit can use its images again."""
        self._params.end()
        self._base.forget()
        del self._updates  # it knows this step, and the two would wait for garbage collection

    def _clip(self, txn: ShardTransaction, told: Told, again: Callable[[], None]) -> None:
        """Make the updates that had to wait, or those again that should have."""
        if self._mode != "global":
            return
        clipped = told.scale < 1.0
        if clipped and self._updates_at_once:
            again()
            self._drop(txn)
            self._params.end()
            self._bring_residents()
            self._updates = self._open_updates(txn)
        if clipped or not self._updates_at_once:
            if self._pipeline.bank is None:
                self._compute_again()
            else:
                self._update_from_bank(self._pipeline.bank)
            self._updates.writes.flush()
        self._pipeline.clipped_last = clipped

    def _compute_again(self) -> None:
        """Take the gradients a second time, now that their scale is known, and update at once."""
        self._known_scale = self._measures.scales["model"]
        self._updates_at_once = True
        self.begin()
        self._replay()

    # The passes

    def _bring_residents(self) -> None:
        """Bring resident stages in again where they do not hold the base."""
        for name, resident in self._residents.items():
            addresses = self._base.address(f"params/{name}"), self._base.address(f"optim/{name}")
            if not resident.holds(self.step - 1, addresses):
                resident.step = None
                self._lanes.wait(Lane.PARAMS_IN, self._lanes.mark(Lane.COMPUTE))
                for kind in ("params", "optim"):
                    self._lanes.wait(Lane.PARAMS_IN, self._base.written(f"{kind}/{name}"))
                with self._lanes.on(Lane.PARAMS_IN, f"resident {name}"):
                    resident.params.copy_(self._base.elements(f"params/{name}"), non_blocking=True)
                    resident.state.copy_(self._base.elements(f"optim/{name}"), non_blocking=True)
                for lane in (Lane.COMPUTE, Lane.UPDATE):
                    self._lanes.wait(lane, self._lanes.mark(Lane.PARAMS_IN))

    def _feed(self, order: Sequence[str], begins_with: Sequence[Brought] = ()) -> Parameters:
        pipeline = self._pipeline
        base, ring, kept = self._base, pipeline.params, self._residents
        return Parameters(self._lanes, base, ring, kept, order, pipeline.peer, begins_with)

    def _open_updates(self, txn: ShardTransaction) -> Updates:
        pipeline = self._pipeline
        order = [(name, pipeline.shapes[name]) for name in self._backward]
        stay = {*self._residents, *pipeline.host_side}
        return Updates(
            lanes=self._lanes,
            base=self._base,
            images=pipeline.images,
            tiles=StateTiles(self._lanes, self._base, pipeline.tiles, stay, order),
            writes=new_writes(
                self._lanes,
                pipeline.sealer,
                order,
                self._residents,
                pipeline.settings.sizes.tile_elements,
                activations_on_host=pipeline.settings.activations_on_host,
            ),
            txn=txn,
            shapes=pipeline.shapes,
            residents=self._residents,
            host_side=pipeline.host_side,
            apply=self._apply,
            step=self.step,
        )

    def _forward(self) -> list[Tensor]:
        """Pass every micro-batch through every stage; give the last stage's outputs."""
        pipeline, hidden = self._pipeline, [batch.ids for batch in self._batches]
        last = len(self._model.trunk) - 1
        for index, stage in enumerate(self._model.trunk):
            brought = self._params.next(stage.name)
            with self._lanes.on(Lane.COMPUTE, f"forward {stage.name}"):
                weights = pipeline.weights_of(stage, brought.buffer)
                for batch, x in enumerate(hidden):
                    hidden[batch] = pipeline.passes.forward(self._compute, stage, weights, x)
                    if index < last:
                        pipeline.boundaries.keep(index, batch, hidden[batch])
            self._params.give_back(brought, Lane.COMPUTE)
        return hidden

    def _head(self, hidden: list[Tensor]) -> _HeadDone:
        """Take the loss and its gradients; `hidden` is used up."""
        model, head, batches = self._model, self._model.head, self._batches
        replayed = range(len(model.trunk) - 1, 0, -1)
        self._pipeline.boundaries.begin_replay(
            [(index - 1, batch) for index in replayed for batch in range(len(batches))]
        )
        brought = self._params.next(head.name)
        slot, total = self._open_sum(head.name)
        with self._lanes.on(Lane.COMPUTE, f"head {head.name}"):
            loss_sum, gradients = self._pipeline.passes.head(
                HeadWork(
                    stage=head,
                    valid_tokens=sum(batch.valid_count for batch in batches),
                    chunk_tokens=model.options.lm_head_chunk_tokens,
                ),
                self._pipeline.weights_of(head, brought.buffer),
                hidden,
                [batch.labels for batch in batches],
                total,
            )
        return _HeadDone(
            brought=brought, slot=slot, total=total, loss_sum=loss_sum, gradients=gradients
        )

    def _finish_head(self) -> list[Tensor]:
        """Update the head, unless it shares its weight; give the gradients of what went into it."""
        done = self._head_done
        del self._head_done
        self._measures.loss_sum = done.loss_sum
        if self._model.tied:
            self._tied_sum = (done.slot, done.total)
            self._params.give_back(done.brought, Lane.COMPUTE)
        else:
            self._finish(self._model.head.name, done.brought, done.slot, done.total)
        return done.gradients

    def _replay(self) -> None:
        """Compute each stage again from what went into it, and go back through it."""
        pipeline, boundaries = self._pipeline, self._pipeline.boundaries
        self._updates.tiles.fetch()
        gradients = self._finish_head()
        for index in range(len(self._model.trunk) - 1, -1, -1):
            stage = self._model.trunk[index]
            brought = self._params.next(stage.name)
            slot, total = (
                self._tied_sum if self._tied_sum and index == 0 else self._open_sum(stage.name)
            )
            with self._lanes.on(Lane.COMPUTE, f"backward {stage.name}"):
                weights = pipeline.weights_of(stage, brought.buffer)
                for batch, tokens in enumerate(self._batches):
                    x = tokens.ids if index == 0 else boundaries.take(index - 1, batch)
                    gradients[batch] = pipeline.passes.backward(
                        self._compute, stage, weights, x, gradients[batch], total
                    )
                    if index > 0:
                        boundaries.done()
                    del x
            self._finish(stage.name, brought, slot, total)

    # Parts of the passes

    def _open_sum(self, name: str) -> tuple[Slot, PlacedSum]:
        slot = self._pipeline.gradients.take(Lane.COMPUTE)
        return slot, PlacedSum(self._pipeline.shapes[name].views(slot.buffer))

    def _finish(self, name: str, brought: Brought, slot: Slot, total: PlacedSum) -> None:
        """Take a stage's norms, then update it now, or bank its gradients for later."""
        pipeline, shape = self._pipeline, self._pipeline.shapes[name]
        norms = self._measures.take_norms(name, total.gradients)
        bank = pipeline.bank if self._mode == "global" else None
        if bank is not None:
            bank.keep(name, shape, slot.buffer, half=total.fits_half)
        if not self._updates_at_once:
            self._params.give_back(brought, Lane.COMPUTE)
            pipeline.gradients.give_back(slot, bank.lane if bank else Lane.COMPUTE)
            return
        if self._known_scale is not None:
            slot.buffer[: shape.count].mul_(self._known_scale)
        elif self._mode == "shard":
            slot.buffer[: shape.count].mul_(self._measures.scale_of(name, total_norm([norms])))
        self._updates.update(brought, slot.buffer, self._lanes.mark(Lane.COMPUTE))
        self._params.give_back_updated(brought, here=name not in pipeline.host_side)
        pipeline.gradients.give_back(slot, Lane.UPDATE, self._copied_out(name, bank))

    def _copied_out(self, name: str, bank: GradientBank | None) -> Mark | None:
        """Give the mark behind which a gradient slot's copy to the host, if there is one, is."""
        copied = name in self._pipeline.host_side or (bank and bank.lane is Lane.OUT)
        return self._lanes.mark(Lane.OUT) if copied else None

    def _update_from_bank(self, bank: GradientBank) -> None:
        """Update every stage from the base with gradients that are known and scaled."""
        pipeline, scale = self._pipeline, self._measures.scales["model"]
        self._params = self._feed(self._backward)
        self._updates.tiles.fetch()
        for name in self._backward:
            brought = self._params.next(name)
            shape = pipeline.shapes[name]
            slot = pipeline.gradients.take(Lane.UPDATE)
            bank.bring(name, shape, slot.buffer)
            with self._lanes.on(Lane.UPDATE):
                slot.buffer[: shape.count].mul_(scale)
            self._updates.update(brought, slot.buffer, None)
            self._params.give_back(brought, Lane.OUT)
            pipeline.gradients.give_back(slot, Lane.UPDATE, self._copied_out(name, None))

    def _drop(self, txn: ShardTransaction) -> None:
        """Drop what was staged and should not have been."""
        self._pipeline.sealer.drain()
        for lane in (Lane.OUT, Lane.OUT_LATER):
            self._lanes.arrive(self._lanes.mark(lane, for_host=True))
        for shard in self._updates.writes.staged:
            txn.discard(shard)
        for name, resident in self._residents.items():
            if f"params/{name}" in self._updates.writes.staged:
                resident.step = None

    def _apply(self, tile: TileTensors, step: Tensor | None) -> None:
        self._pipeline.rule.apply(
            tile.params,
            tile.gradients,
            tile.states,
            decayed=tile.decayed,
            step=self._pipeline.step_number if step is None else step,
            learning_rate=self._order.learning_rate,
        )

    # The end

    def _result(self, told: Told) -> StepResult:
        pipeline = self._pipeline
        valid_tokens = sum(batch.valid_count for batch in self._batches)
        return StepResult(
            loss=told.loss_sum / valid_tokens,
            grad_norm=told.norm,
            clip_scale=told.scale,
            tokens=sum(batch.ids.numel() for batch in self._batches),
            valid_tokens=valid_tokens,
            updated_shards=len(self._backward),
            max_active_param_shards=len(pipeline.params) + len(self._residents),
            max_active_optimizer_shards=len(pipeline.tiles) + len(self._residents),
            shard_norms=told.shard_norms,
            timings=dict(self._clock.seconds),
        )
