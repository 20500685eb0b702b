"""The loss at the head, over chunks of tokens, with the backward pass of each chunk in turn.

Owns the sum over valid tokens and the head's gradients. Knows nothing of stages below or of shards.
A chunk's logits live only while that chunk is worked on; a loop with one backward pass at its end
would keep them all. The weight's gradient is summed in fp32.

Shapes: N tokens of a micro-batch (B * T), D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.gradients import GradientSum
from trainer.model.stages import Stage
from trainer.placement import Boundary

IGNORED_LABEL = -100
# Of tensors without content only memory is asked. Whole chunks take as much of it as the third,
# where sums are there and one chunk follows another; the last one may be shorter.
CHUNKS_WALKED = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadGradients:
    """The loss summed over valid tokens (float64), and the gradients of its scaled mean."""

    loss_sum: Tensor
    hidden: Boundary
    params: dict[str, Tensor]


class HeadWork(Protocol):
    """Another way to work on a chunk of a head without gradients of its own."""

    def __call__(
        self, head: Stage, x_ND: Tensor, labels_N: Tensor, seed: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Give the gradient of seed * loss to x, and the loss summed over valid tokens."""
        ...


def head_backward(
    head: Stage,
    params: Mapping[str, Tensor],
    hidden: Boundary | Sequence[Tensor],
    labels: Sequence[Tensor],
    *,
    valid_tokens: int,
    chunk_tokens: int,
    loss_scale: float = 1.0,
    into: Boundary | None = None,
    work: HeadWork | None = None,
) -> HeadGradients:
    """Give the loss and the gradients of (loss_scale * loss sum / valid_tokens), chunk by chunk.

    hidden: [B, T, D] and labels: [B, T] a micro-batch; chunks never span two micro-batches.
    into: where the gradients of `hidden` are put. work: what works on chunks, where no `params` are
    trained.
    """
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
    total = GradientSum()
    loss_sum = torch.zeros((), dtype=torch.float64, device=labels[0].device)
    # 1/n as an fp32 quotient is what autograd itself would send back through a division by n.
    seed = torch.full((), loss_scale, device=labels[0].device) / valid_tokens
    hidden_gradients: Boundary = [] if into is None else into
    for x_BTD, labels_BT in zip(hidden, labels, strict=True):
        if work is not None:
            given = (head, x_BTD, labels_BT, seed, chunk_tokens, work, loss_sum)
            hidden_gradients.append(_worked(*given))
            continue
        hidden_gradients.append(
            batch_backward(head, leaves, x_BTD, labels_BT, seed, chunk_tokens, total, loss_sum)
        )
    return HeadGradients(loss_sum=loss_sum, hidden=hidden_gradients, params=total.gradients)


def batch_backward(
    head: Stage,
    leaves: Mapping[str, Tensor],
    x_BTD: Tensor,
    labels_BT: Tensor,
    seed: Tensor,
    chunk_tokens: int,
    total: GradientSum,
    loss_sum: Tensor,
) -> Tensor:
    """Give the gradient of one micro-batch's hidden states; add to `total` and `loss_sum`."""
    gradient_ND = torch.empty_like(x_BTD).flatten(0, 1)
    for rows, x_ND, labels_N in _chunks(x_BTD, labels_BT, chunk_tokens):
        leaf_ND = x_ND.detach().requires_grad_()
        loss = _loss_sum(head, leaves, leaf_ND, labels_N)
        gradient_ND[rows], *weight = torch.autograd.grad(
            loss, [leaf_ND, *leaves.values()], grad_outputs=seed
        )
        total.add(dict(zip(leaves, weight, strict=True)))
        del weight  # a whole head's gradient, not to be held beside the next chunk's
        loss_sum += loss.detach().double()
    return gradient_ND.view_as(x_BTD)


def _worked(
    head: Stage,
    x_BTD: Tensor,
    labels_BT: Tensor,
    seed: Tensor,
    chunk_tokens: int,
    work: HeadWork,
    loss_sum: Tensor,
) -> Tensor:
    gradient_ND = torch.empty_like(x_BTD).flatten(0, 1)
    for rows, x_ND, labels_N in _chunks(x_BTD, labels_BT, chunk_tokens):
        gradient_ND[rows], loss = work(head, x_ND, labels_N, seed)
        loss_sum += loss.double()
    return gradient_ND.view_as(x_BTD)


def head_loss_sum(
    head: Stage,
    params: Mapping[str, Tensor],
    hidden: Boundary | Sequence[Tensor],
    labels: Sequence[Tensor],
    *,
    chunk_tokens: int,
) -> Tensor:
    """Give the loss summed over valid tokens, float64, without gradients."""
    loss_sum = torch.zeros((), dtype=torch.float64, device=labels[0].device)
    with torch.no_grad():
        for x_BTD, labels_BT in zip(hidden, labels, strict=True):
            for _, x_ND, labels_N in _chunks(x_BTD, labels_BT, chunk_tokens):
                loss_sum += _loss_sum(head, params, x_ND, labels_N).double()
    return loss_sum


def _loss_sum(head: Stage, params: Mapping[str, Tensor], x_ND: Tensor, labels_N: Tensor) -> Tensor:
    logits_NV = head.forward(params, x_ND).float()
    return F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED_LABEL, reduction="sum")


def _chunks(
    x_BTD: Tensor, labels_BT: Tensor, chunk_tokens: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    x_ND, labels_N = x_BTD.flatten(0, 1), labels_BT.flatten()
    starts: Sequence[int] = range(0, len(labels_N), chunk_tokens)
    if labels_N.is_meta and len(starts) > CHUNKS_WALKED:
        starts = (*starts[: CHUNKS_WALKED - 1], starts[-1])
    for start in starts:
        rows = slice(start, start + chunk_tokens)
        yield rows, x_ND[rows], labels_N[rows]
