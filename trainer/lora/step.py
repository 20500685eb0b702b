"""One training step of adapters beside a frozen base.

Owns the order: forward through every stage, back through those above the first adapter, then the
updates. Invariants: a stage's weights are bound while it runs and at no other time, so a replay
computes with what was brought in for it; whatever the number of micro-batches, each frozen shard is
brought in once on the way forward and once on the way back; only adapters and their state are
staged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from shardb import ShardView
from trainer.backward import StageGradients
from trainer.clipping import clip_factor, total_norm
from trainer.errors import NonFiniteError
from trainer.gradient_pass import GradientPass
from trainer.gradients import GradientSum, taken
from trainer.lora.away import AwayTape
from trainer.lora.ledger_tape import tape_of
from trainer.lora.model import AdaptedModel
from trainer.lora.updating import Updates, updates_of
from trainer.lora.visits import Adapters, Visits, brought, open_visits, read_adapters
from trainer.lora.waiting import Waiting
from trainer.model.micro_batch import drop_keys
from trainer.step import ShardTransaction, StepOrder, StepResult
from trainer.tape import Compute, Tape
from trainer.timing import StepClock
from trainer.tokens import Tokens


class AdapterPass(GradientPass):
    """`run` yields the adapters' gradients, from the last stage to the first.

    at_end: called with this and them when everything is asked for, before anybody looks.
    """

    kind: ClassVar[str] = "adapters"

    def __init__(
        self,
        model: AdaptedModel,
        visits: Visits,
        compute: Compute,
        views: Mapping[str, ShardView],
        *,
        loss_scale: float = 1.0,
        drop_keys: Sequence[str | None] = (),
        at_end: Callable[[AdapterPass, Sequence[StageGradients]], None] = lambda _pass, _found: (
            None
        ),
    ) -> None:
        compute = compute.knowing(drop_keys)
        super().__init__(model.step, None, compute, loss_scale=loss_scale)
        self.shard_norms: dict[str, Tensor] = {}
        self._loss_later: tuple[Tensor, int] | None = None
        self._adapted = model
        self._visits = visits
        self._at_end = at_end
        self._views = views
        self._adapters: Adapters = brought(model, views)
        self._kept = model.step.options.activations
        self._head_work = model.head_work
        self._away = None if model.base is None else model.base.boundaries
        if self._away is not None:
            self._compute = replace(self._compute, new_boundary=list)

    def run(self, batches: Sequence[Tokens]) -> Iterator[StageGradients]:
        """Yield each adapter shard's gradients.

        Raises:
            NonFiniteError: the loss or a gradient is not finite.
            GradientOverflowError: a gradient is not finite, and the loss was scaled.
        """
        model, clock = self._adapted, self._compute.clock
        self._compute = self._compute.knowing(documents=[batch.documents for batch in batches])
        tapes = self._forward([batch.ids for batch in batches])
        if self._away is not None:
            places = (len(tapes) - 1 - index for index in range(len(model.backward)))
            self._away.begin_replay([(p, b) for p in places for b in range(len(batches))])
        with self._visits.visit(model.head):
            gradients = self._head({}, tapes, batches).hidden
        found = []
        for stage in model.backward:
            total = GradientSum()
            measured = clock.measure("backward_kernel_seconds")
            with self._visits.visit(stage), stage.binding.replaying(), measured:
                tapes.pop().backward(self._adapters.get(stage.name, {}), gradients, total)
            if stage.parameters:
                assert list(total.gradients) == list(stage.parameters), "an adapter has no gradient"
                ready = StageGradients(
                    stage=stage, view=self._views[stage.name], gradients=taken(total.gradients)
                )
                found.append(self._measured(ready))
                self.shard_norms[stage.name] = total_norm([self.norms[stage.name]])
        total_of_all = self.total_norm()
        self._at_end(self, found)
        # One look at all of them, behind the last: each look lets a device run dry.
        if self._loss_later is not None:
            self._look_at_loss(*self._loss_later)
        if not math.isfinite(float(total_of_all)):
            for ready in found:
                self._check(ready)
        yield from found

    def _note_loss(self, loss_sum: Tensor, valid_tokens: int, tapes: Sequence[Tape]) -> None:
        """On a device, let the backward pass be asked for before anybody looks."""
        if self._adapted.base is None:
            super()._note_loss(loss_sum, valid_tokens, tapes)
        else:
            self._loss_later = (loss_sum, valid_tokens)

    def _look_at_loss(self, loss_sum: Tensor, valid_tokens: int) -> None:
        self.loss = float(loss_sum) / valid_tokens
        if not math.isfinite(self.loss):
            raise NonFiniteError(
                f"the loss is {self.loss}: training diverged and nothing was committed; resume"
                " with a lower --learning-rate",
                shard=f"params/{self._adapted.head.name}",
                tensor="logits",
            )

    def total_norm(self) -> Tensor:
        """Give the norm over all adapters, tensors in forward order."""
        return total_norm([self.norms[stage.name] for stage in self._adapted.owners])

    def _forward(self, ids: Sequence[Tensor]) -> list[Tape]:
        if self._away is not None:
            return self._forward_away(ids, self._away)
        tapes: list[Tape] = []
        gone_back = {stage.name for stage in self._adapted.backward}
        for stage in self._adapted.trunk:
            given = (stage, self._compute, self._adapters.get(stage.name, {}))
            inputs = tapes[-1].outputs if tapes else ids
            kept = self._kept if stage.name in gone_back else "recompute"
            with self._visits.visit(stage), self._measured_forward():
                tapes.append(tape_of(*given, inputs, activations=kept))
        return tapes

    def _forward_away(self, ids: Sequence[Tensor], away: Waiting) -> list[Tape]:
        """Look the rows of a micro-batch up when the first block comes to it.

        The host does so while the device computes that block for the one before.
        """
        away.reset()
        trunk, hidden = [*self._adapted.trunk], list(ids)
        tapes: list[Tape] = []
        look_up: Callable[[Tensor, int], Tensor] | None = None
        with ExitStack() as held:
            if trunk[0].is_table:
                table = trunk.pop(0)
                held.enter_context(self._visits.visit(table))
                hidden = [each.to("cpu") for each in ids]  # now, while there is nothing to wait for
                look_up = partial(self._compute.run, table, {})
            first = len(trunk) - len(self._adapted.backward)
            for place, stage in enumerate(trunk):
                params = self._adapters.get(stage.name, {})
                kept = place if place >= first else None
                given = (stage, self._compute, params, hidden, away, kept)
                leaves = self._kept == "attention" and stage.is_block
                with self._visits.visit(stage), self._measured_forward():
                    tapes.append(AwayTape(*given, before=look_up, leaves=leaves))
                look_up = None
        return tapes

    def _measured_forward(self) -> AbstractContextManager[None]:
        return self._compute.clock.measure("forward_kernel_seconds")


class AdapterStep:
    """One step: `run` stages the next version of every adapter and its state.

    at_end: called when everything is asked for, what is done before anybody looks.
    """

    def __init__(
        self,
        model: AdaptedModel,
        txn: ShardTransaction,
        order: StepOrder,
        *,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._at_end = at_end
        self._model = model
        self._txn = txn
        self._order = order
        self._max_norm = model.step.options.max_grad_norm * order.grad_norm_scale
        self._norms: _Norms | None = None
        self._clock = StepClock(
            model.step.device.wait if model.step.options.timing_sync_cuda else None
        )

    def run(self, batches: Sequence[Tokens]) -> StepResult:
        """Do the whole step on `batches`, which hold at least one label that counts."""
        model = self._model
        model.step.prepare(batches)
        views = read_adapters(model, self._txn)
        updates = updates_of(model, self._txn, self._order, views)
        model.begin_pass(batches[0].ids.numel())
        with open_visits(model, self._txn, model.gradient_order(), self._clock) as visits:
            gradients = AdapterPass(
                model,
                visits,
                model.step.compute(self._clock),
                views,
                loss_scale=self._order.loss_scale,
                drop_keys=self._drop_keys(len(batches)),
                at_end=partial(self._begin, updates),
            )
            try:
                ready = {each.stage.name: each for each in gradients.run(batches)}
            except NonFiniteError:
                updates.forget()
                raise
        assert self._norms is not None, "a pass ended without its end"
        grad_norm, shard_norms, scales = self._norms.look()
        with self._clock.measure("optimizer_math_seconds"):
            updates.update([ready.pop(name) for name in scales], scales)
        model.step.device.wait()
        return StepResult(
            loss=gradients.loss,
            grad_norm=grad_norm,
            clip_scale=min(scales.values()),
            tokens=sum(batch.ids.numel() for batch in batches),
            valid_tokens=sum(batch.valid_count for batch in batches),
            updated_shards=len(scales),
            max_active_param_shards=visits.active_max,
            max_active_optimizer_shards=1,
            shard_norms=shard_norms,
            timings=dict(self._clock.seconds),
        )

    def _drop_keys(self, count: int) -> list[str | None]:
        """A step that is made again, by a replay or after a kill, drops the same."""
        rate, seed = self._model.trunk[0].lora.dropout, self._model.step.options.seed
        return drop_keys(rate, seed=seed, step=self._order.step, count=count)

    def _begin(
        self, updates: Updates, gradients: AdapterPass, found: Sequence[StageGradients]
    ) -> None:
        self._norms = self._norms_of(gradients)
        updates.begin(found, self._norms.factors)
        self._at_end()

    def _norms_of(self, gradients: AdapterPass) -> _Norms:
        mode, norms = self._model.step.options.grad_clip_mode, gradients.shard_norms
        names, total = [stage.name for stage in self._model.owners], gradients.total_norm()
        if mode == "shard":
            factors = {name: clip_factor(norms[name], self._max_norm) for name in names}
        else:
            one = torch.ones_like(total) if mode == "none" else clip_factor(total, self._max_norm)
            factors = dict.fromkeys(names, one)
        seen = torch.stack([total, *(norms[n] for n in names), *factors.values()])
        return _Norms(factors=factors, seen=seen)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Norms:
    """What clips each shard; `seen` is the norm of all, then each shard's, then the factors."""

    factors: Mapping[str, Tensor]
    seen: Tensor

    def look(self) -> tuple[float, dict[str, float], dict[str, float]]:
        """Give the norm of all, each shard's, and what clips it, in one look."""
        total, *others = self.seen.tolist()
        count = len(self.factors)
        norms, factors = others[:count], others[count:]
        return (
            total,
            dict(zip(self.factors, norms, strict=True)),
            dict(zip(self.factors, factors, strict=True)),
        )
