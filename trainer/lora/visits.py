"""Visits to stages: each brings a frozen shard in, binds it, and lets it go.

Owns the passes that need no gradients: held-out loss and logits. Knows nothing of updates.
Layer-major: all batches pass a stage in one visit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor

from shardb import ShardView, torch_adaptor
from trainer.evaluate import EvalResult, mean_loss
from trainer.head import head_loss_sum
from trainer.lora.model import AdaptedModel
from trainer.lora.stages import AdaptedStage
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
    found = {}
    for stage in model.owners:
        tensors = torch_adaptor.tensors(views[stage.name])
        found[stage.name] = {n: model.step.device.to_device(tensors[n]) for n in stage.parameters}
    return found


def open_window(
    model: AdaptedModel, reader: ShardReader, order: Sequence[str], clock: StepClock
) -> ShardWindow:
    """Give the window of a pass over the frozen shards."""
    prefetch = prefetch_of(model.step.options, model.step.device)
    return ShardWindow(reader, order, prefetch=prefetch, clock=clock)


@contextmanager
def visit(
    model: AdaptedModel, window: ShardWindow, stage: AdaptedStage, clock: StepClock
) -> Iterator[None]:
    """Have a stage's weights bound for a block."""
    with window.take(stage.shard) as view, ExitStack() as held:
        with clock.measure("h2d_seconds"):
            lease = held.enter_context(model.pool.lease(view, model.form(stage)))
        with stage.binding.bound(lease):
            yield


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
        with self._window(reader) as window, torch.no_grad():
            [hidden] = self._passed(reader, window, [ids])
            with visit(self._model, window, self._model.head, self._compute.clock):
                return self._model.head.forward({}, hidden[:, -1:] if last_only else hidden)

    def _group_loss(self, reader: ShardReader, group: Sequence[Tokens]) -> float:
        head, chunk = self._model.head, self._model.step.options.lm_head_chunk_tokens
        with self._window(reader) as window, torch.no_grad():
            hidden = self._passed(reader, window, [batch.ids for batch in group])
            labels = [batch.labels for batch in group]
            with visit(self._model, window, head, self._compute.clock):
                return float(head_loss_sum(head, {}, hidden, labels, chunk_tokens=chunk))

    def _passed(self, reader: ShardReader, window: ShardWindow, ids: Sequence[Tensor]) -> Boundary:
        """Pass every batch through every stage and keep nothing; give the last one's outputs."""
        with window.lock:
            adapters = brought(self._model, read_adapters(self._model, reader))
        outputs = self._compute.new_boundary()
        for stage in self._model.trunk:
            params = adapters.get(stage.name, {})
            with visit(self._model, window, stage, self._compute.clock):
                for index, each in enumerate(ids):
                    if index == len(outputs):
                        outputs.append(self._compute.run(stage, params, each))
                    else:
                        outputs[index] = self._compute.run(stage, params, outputs[index])
        return outputs

    def _window(self, reader: ShardReader) -> ShardWindow:
        return open_window(self._model, reader, self._model.forward_order(), self._compute.clock)
