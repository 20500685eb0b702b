"""Passes recorded once and done again: one call in the place of a hundred.

Owns the recordings and their fixed buffers. Every block computes with the same addresses (the cast
weights, an input, a gradient), so one recording of each pass serves all of them. The last norm has
its own: what it uses inside is then memory that blocks use too. The head has one for each slot that
its gradients are summed in. Knows nothing of the order of stages. Where nothing
can be recorded (on the host) passes are computed as they are; both ways give the same bits, because
they are the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.device_lanes import Lanes
from trainer.gradients import PlacedSum
from trainer.head import batch_backward
from trainer.model.stages import Block, FinalNorm, Stage
from trainer.tape import Compute

# Slots, with and without terms, for a few numbers of valid tokens; others are computed as they are.
HEADS_MAX = 12
# What looks rows up has so much of its gradient made at a time.
COLUMNS_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class _Recorded:
    x: Tensor
    gradient: Tensor
    output: Tensor
    forward: Callable[[], None]
    found: tuple[Tensor, ...]
    backward: Callable[[], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _RecordedHead:
    x: Tensor
    labels: Tensor
    gradient: Tensor
    run: Callable[[], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadWork:
    """The head of a step: its loss is a mean over `valid_tokens`."""

    stage: Stage
    valid_tokens: int
    chunk_tokens: int

    def run(
        self,
        weights: Mapping[str, Tensor],
        x_BTD: Tensor,
        labels_BT: Tensor,
        total: PlacedSum,
        loss_sum: Tensor,
    ) -> Tensor:
        """Give the gradient of one micro-batch's hidden states."""
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}
        seed = torch.full((), 1.0, device=labels_BT.device) / self.valid_tokens
        return batch_backward(
            self.stage, leaves, x_BTD, labels_BT, seed, self.chunk_tokens, total, loss_sum
        )


class Passes:
    """Computes stages forward and backward; blocks from recordings once `may_record` is set."""

    def __init__(self, lanes: Lanes) -> None:
        self.may_record = False
        self._lanes = lanes
        self._recorded: dict[tuple[object, ...], _Recorded | None] = {}
        self._heads: dict[tuple[object, ...], _RecordedHead | None] = {}
        self._fixed: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}
        self._labels: dict[torch.Size, Tensor] = {}
        self._loss_sum: Tensor | None = None

    def forward(
        self, compute: Compute, stage: Stage, weights: Mapping[str, Tensor], x: Tensor
    ) -> Tensor:
        """Give a stage's output, without history."""
        recorded = self._of(compute, stage, weights, x)
        if recorded is None:
            with torch.no_grad():
                return compute.run(stage, weights, x)
        recorded.x.copy_(x)
        recorded.forward()
        return recorded.output.clone()

    def backward(
        self,
        compute: Compute,
        stage: Stage,
        weights: Mapping[str, Tensor],
        x: Tensor,
        gradient: Tensor,
        total: PlacedSum,
    ) -> Tensor:
        """Compute a stage again and go back through it; give the gradient of `x`.

        Token ids have none: the output's gradient comes back, unused.
        """
        recorded = self._of(compute, stage, weights, x)
        if recorded is None:
            return _back(compute, stage, weights, x, gradient, total)
        recorded.x.copy_(x)
        recorded.gradient.copy_(gradient)
        recorded.backward()
        total.add(dict(zip(weights, recorded.found, strict=False)))
        return gradient.copy_(recorded.found[-1])

    def head(
        self,
        work: HeadWork,
        weights: Mapping[str, Tensor],
        hidden: list[Tensor],
        labels: Sequence[Tensor],
        total: PlacedSum,
    ) -> tuple[Tensor, list[Tensor]]:
        """Give the loss summed over tokens and the gradients of its mean by `hidden`, used up."""
        if self._loss_sum is None:
            self._loss_sum = torch.zeros((), dtype=torch.float64, device=labels[0].device)
        loss_sum = self._loss_sum.zero_()
        found = []
        for batch, labels_BT in enumerate(labels):
            x_BTD = hidden[batch]
            recorded = self._head_of(work, weights, x_BTD, labels_BT, total)
            if recorded is None:
                found.append(work.run(weights, x_BTD, labels_BT, total, loss_sum))
                continue
            recorded.x.copy_(x_BTD)
            recorded.labels.copy_(labels_BT)
            recorded.run()
            total.added_elsewhere()
            found.append(recorded.gradient.clone())
        hidden.clear()
        return loss_sum, found

    def _head_of(
        self,
        work: HeadWork,
        weights: Mapping[str, Tensor],
        x: Tensor,
        labels: Tensor,
        total: PlacedSum,
    ) -> _RecordedHead | None:
        place = next(iter(total.gradients.values())).data_ptr()
        key = (work, x.shape, x.dtype, place, total.has_terms)
        if key not in self._heads:
            if not self.may_record or len(self._heads) >= HEADS_MAX:
                return None
            self._heads[key] = self._record_head(work, weights, x, labels, total)
        return self._heads[key]

    def _record_head(
        self,
        work: HeadWork,
        weights: Mapping[str, Tensor],
        x: Tensor,
        labels: Tensor,
        total: PlacedSum,
    ) -> _RecordedHead | None:
        """Record it on buffers that all recordings share, so that nothing lasts of each."""
        (fixed, gradient), loss_sum = self._buffers(x), self._loss_sum
        assert loss_sum is not None
        if labels.shape not in self._labels:
            self._labels[labels.shape] = labels.clone()
        fixed_labels, has_terms = self._labels[labels.shape], total.has_terms

        def run() -> None:
            same = PlacedSum(total.gradients, has_terms=has_terms)
            gradient.copy_(work.run(weights, fixed, fixed_labels, same, loss_sum))

        captured = self._lanes.capture(run)
        if captured is None:
            return None
        return _RecordedHead(x=fixed, labels=fixed_labels, gradient=gradient, run=captured[1])

    def _buffers(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Give the fixed input and gradient of this shape, which all recordings share."""
        key = (x.shape, x.dtype)
        if key not in self._fixed:
            self._fixed[key] = torch.empty_like(x).copy_(x), torch.zeros_like(x)
        return self._fixed[key]

    def _of(
        self, compute: Compute, stage: Stage, weights: Mapping[str, Tensor], x: Tensor
    ) -> _Recorded | None:
        if not isinstance(stage, Block | FinalNorm):
            return None
        key = (type(stage), stage.config, x.shape, x.dtype)
        if key not in self._recorded:
            if not self.may_record:
                return None
            self._recorded[key] = self._record(compute, stage, weights, x)
        return self._recorded[key]

    def _record(
        self, compute: Compute, stage: Stage, weights: Mapping[str, Tensor], x: Tensor
    ) -> _Recorded | None:
        fixed, gradient = self._buffers(x)
        # What a copy more costs does not count once a step, but lasting results of its own would.
        leaves_nothing = isinstance(stage, FinalNorm)

        def forward() -> Tensor:
            with torch.no_grad():
                output = compute.run(stage, weights, fixed)
            return gradient.copy_(output) if leaves_nothing else output

        def backward() -> tuple[Tensor, ...]:
            found = _found(compute, stage, weights, fixed, gradient)
            return (*found[:-1], gradient.copy_(found[-1])) if leaves_nothing else found

        first = self._lanes.capture(forward)
        second = self._lanes.capture(backward)
        if first is None or second is None:
            return None
        return _Recorded(
            x=fixed,
            gradient=gradient,
            output=first[0],
            forward=first[1],
            found=second[0],
            backward=second[1],
        )


def _back(
    compute: Compute,
    stage: Stage,
    weights: Mapping[str, Tensor],
    x: Tensor,
    gradient: Tensor,
    total: PlacedSum,
) -> Tensor:
    if stage.keeps_master_dtype:
        _back_by_columns(compute, stage, weights, x, gradient, total)
        return gradient
    found = _found(compute, stage, weights, x, gradient)
    total.add(dict(zip(weights, found, strict=False)))
    return found[-1]


def _back_by_columns(
    compute: Compute,
    stage: Stage,
    weights: Mapping[str, Tensor],
    x: Tensor,
    gradient: Tensor,
    total: PlacedSum,
) -> None:
    """Go back through a stage that looks rows up, some columns at a time: each is by itself.

    The gradient of a whole vocabulary would lie there twice, once before it is added.
    """
    for name, weight in weights.items():
        columns = max(1, COLUMNS_BYTES // (weight.shape[0] * weight.element_size()))
        for start in range(0, weight.shape[1], columns):
            some = slice(start, start + columns)
            part = {name: weight[:, some]}
            found = _found(compute, stage, part, x, gradient[..., some])
            place = PlacedSum({name: total.gradients[name][:, some]}, has_terms=total.has_terms)
            place.add({name: found[0]})
    total.added_elsewhere()


def _found(
    compute: Compute, stage: Stage, weights: Mapping[str, Tensor], x: Tensor, gradient: Tensor
) -> tuple[Tensor, ...]:
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}
    leaf = x.detach().requires_grad_(x.is_floating_point())
    with torch.enable_grad():
        output = compute.run(stage, leaves, leaf)
    wanted = [*leaves.values(), *([leaf] if leaf.requires_grad else [])]
    return torch.autograd.grad(output, wanted, grad_outputs=gradient)
