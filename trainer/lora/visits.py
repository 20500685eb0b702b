"""Visits to stages: each brings a frozen shard in, binds it, and lets it go.

Owns the passes that need no gradients: held-out loss and logits. Knows nothing of updates.
Layer-major: all batches pass a stage in one visit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from shardb import ShardView, torch_adaptor
from trainer.evaluate import EvalResult, mean_loss
from trainer.head import head_loss_sum
from trainer.lora import nf4
from trainer.lora.feeding import Feed
from trainer.lora.model import AdaptedModel
from trainer.lora.runs import Bodies
from trainer.lora.slots import Lease
from trainer.lora.stages import AdaptedStage, leased
from trainer.placement import Boundary
from trainer.prefetch import prefetch_of
from trainer.residency import ShardReader, ShardWindow
from trainer.tape import Compute
from trainer.timing import StepClock
from trainer.tokens import Tokens

Adapters = Mapping[str, Mapping[str, Tensor]]


def read_adapters(model: AdaptedModel, reader: ShardReader) -> dict[str, ShardView]:
    """Read every adapter's shard, by stage: kilobytes beside the base."""
    return {stage.name: reader.read(f"adapters/{stage.name}") for stage in model.owners}


def brought(model: AdaptedModel, views: Mapping[str, ShardView]) -> Adapters:
    """Give the adapters as they compute: fp32 on the device, in the stages' own order."""
    if model.base is not None and (bodies := Bodies.of(views)) is not None:
        run = model.base.copies.run_to_device(bodies, views)
        whole = bodies.tensors(views, run)
        return {s.name: {n: whole[s.name, n] for n in s.parameters} for s in model.owners}
    stored = {s.name: torch_adaptor.tensors(views[s.name]) for s in model.owners}
    if model.base is None:
        move = model.step.device.to_device
        return {
            stage.name: {n: move(stored[stage.name][n]) for n in stage.parameters}
            for stage in model.owners
        }
    form, image = model.base.copies.to_device(
        {f"{stage}:{name}": t for stage, named in stored.items() for name, t in named.items()}
    )
    found = form.tensors(image)
    return {s.name: {n: found[f"{s.name}:{n}"] for n in s.parameters} for s in model.owners}


class Visits(Protocol):
    """The visits of one pass, in the order that was announced; the block of `with` is the pass."""

    @property
    def active_max(self) -> int:
        """Give how many frozen shards were active at once."""
        ...

    def __enter__(self) -> Visits: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def visit(self, stage: AdaptedStage) -> AbstractContextManager[None]:
        """Have a stage's weights bound for a block."""
        ...


class PlainVisits:
    """One stage after the other: a shard is read, bound where it lies or copied, and let go."""

    def __init__(
        self,
        model: AdaptedModel,
        reader: ShardReader,
        order: Sequence[AdaptedStage],
        clock: StepClock,
    ) -> None:
        self._model = model
        self._clock = clock
        prefetch = prefetch_of(model.step.options, model.step.device)
        names = [stage.shard for stage in order]
        self._window = ShardWindow(reader, names, prefetch=prefetch, clock=clock)

    def __enter__(self) -> PlainVisits:
        self._window.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._window.__exit__(kind, error, trace)

    @property
    def active_max(self) -> int:
        """Give how many frozen shards were active at once."""
        return self._window.active_max["params"]

    @contextmanager
    def visit(self, stage: AdaptedStage) -> Iterator[None]:
        """See `Visits`."""
        model = self._model
        pool, dtype = model.pool, model.form(stage)
        with self._window.take(stage.shard) as view, ExitStack() as held:
            with self._clock.measure("h2d_seconds"):
                lease = held.enter_context(pool.lease(view, dtype))
                if dtype is not None and stage.is_packed and nf4.computes_in(view, dtype):
                    weights = nf4.unpacked(stage.inner, lease.tensors(), dtype)
                    lease = Lease(weights, None, owned=True)
            with leased(stage, lease, poison=pool.poison):
                yield


def open_visits(
    model: AdaptedModel, reader: ShardReader, order: Sequence[AdaptedStage], clock: StepClock
) -> Visits:
    """Give the visits of a pass: fed ahead where the model has a base on a device."""
    if model.base is not None:
        return Feed(model.base, reader, order)
    return PlainVisits(model, reader, order, clock)


class AdaptedEvaluator:
    """Forward passes of one model with adapters over shards of any reader."""

    def __init__(self, model: AdaptedModel) -> None:
        self._model = model
        self._compute: Compute = model.step.compute(StepClock())

    def evaluate(self, reader: ShardReader, batches: Iterable[Tokens]) -> EvalResult:
        """Give the mean loss; InputError when there is no valid token at all."""
        return mean_loss(batches, partial(self._group_loss, reader))

    def logits(self, reader: ShardReader, ids: Tensor, *, last_only: bool = False) -> Tensor:
        """Score ids [B, T]: [B, T, V] in the compute dtype; only the last position if asked."""
        views = read_adapters(self._model, reader)
        with self._open(reader) as visits, torch.no_grad():
            [hidden] = self._passed(views, visits, [ids], self._compute)
            with visits.visit(self._model.head):
                return self._model.head.forward({}, hidden[:, -1:] if last_only else hidden)

    def _group_loss(self, reader: ShardReader, group: Sequence[Tokens]) -> float:
        head, chunk = self._model.head, self._model.step.options.lm_head_chunk_tokens
        views = read_adapters(self._model, reader)
        with self._open(reader) as visits, torch.no_grad():
            compute = self._compute.knowing(documents=[batch.documents for batch in group])
            hidden = self._passed(views, visits, [batch.ids for batch in group], compute)
            labels = [batch.labels for batch in group]
            with visits.visit(head):
                return float(head_loss_sum(head, {}, hidden, labels, chunk_tokens=chunk))

    def _passed(
        self,
        views: Mapping[str, ShardView],
        visits: Visits,
        ids: Sequence[Tensor],
        compute: Compute,
    ) -> Boundary:
        """Pass every batch through every stage and keep nothing; give the last one's outputs."""
        adapters = brought(self._model, views)
        outputs = compute.new_boundary()
        for stage in self._model.trunk:
            params = adapters.get(stage.name, {})
            with visits.visit(stage):
                for index, each in enumerate(ids):
                    if index == len(outputs):
                        outputs.append(compute.run(stage, params, each, index))
                    else:
                        outputs[index] = compute.run(stage, params, outputs[index], index)
        return outputs

    def _open(self, reader: ShardReader) -> Visits:
        order = [*self._model.trunk, self._model.head]
        return open_visits(self._model, reader, order, self._compute.clock)
