"""A frozen head's loss and gradient as one compiled function beside its two products.

Owns what happens to a chunk's logits between the products: they become their own gradient where
they lie, and are never there in fp32. Knows nothing of where weights come from. Its kernels round
otherwise than PyTorch's own, as those of compiled blocks do, and belong to a run's recipe with
them.

Shapes: N tokens of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.head import IGNORED_LABEL, HeadWork
from trainer.lora.stages import AdaptedStage
from trainer.model.compiled import compiled_closed, told
from trainer.model.stages import LmHead, Stage


def takes(head: Stage) -> bool:
    """Say whether a head is scored this way."""
    return type(head) is LmHead


class CompiledHead(HeadWork):
    """Works on the chunks of a frozen head whose weight is bound."""

    def __init__(self) -> None:
        self._in_place = compiled_closed(gradient_in_place)

    def __call__(
        self, head: Stage, x_ND: Tensor, labels_N: Tensor, seed: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `HeadWork`.

        Raises:
            InputError: this machine cannot compile (no C compiler, no Triton).
        """
        assert isinstance(head, AdaptedStage)
        [weight_VD] = head.binding.weights().values()
        with torch.no_grad():
            logits_NV = F.linear(x_ND, weight_VD)
            loss = told(self._in_place, logits_NV, labels_N, seed)
            return logits_NV @ weight_VD, loss


def gradient_in_place(logits_NV: Tensor, labels_N: Tensor, seed: Tensor) -> Tensor:
    """Turn logits into the gradient of seed times their loss; give the loss, in fp32."""
    wide = logits_NV.float()
    is_valid = labels_N != IGNORED_LABEL
    counts_N1 = is_valid.unsqueeze(1)
    label_N1 = torch.where(is_valid, labels_N, 0).unsqueeze(1)
    largest = wide.amax(-1, keepdim=True)
    sums = largest + (wide - largest).exp().sum(-1, keepdim=True).log()
    of_label = logits_NV.gather(1, label_N1).float()
    loss = torch.where(counts_N1, sums - of_label, 0.0).sum()
    is_label = torch.arange(logits_NV.shape[1], device=logits_NV.device) == label_N1
    gradient = ((wide - sums).exp() - is_label.float()) * seed
    logits_NV.copy_(torch.where(counts_N1, gradient, 0.0))
    return loss


class WalkedHead(HeadWork):
    """Stands for `CompiledHead` where memory is walked through."""

    def __call__(
        self, head: Stage, x_ND: Tensor, labels_N: Tensor, seed: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Hold what a chunk holds; see `HeadWork`."""
        assert isinstance(head, AdaptedStage)
        rows, vocabulary = len(labels_N), head.config.vocab_size
        logits_NV = x_ND.new_empty(rows, vocabulary)
        sums = [x_ND.new_empty(rows, 1, dtype=torch.float32) for _ in range(2)]
        loss = x_ND.new_empty((), dtype=torch.float32)
        found = torch.empty_like(x_ND)
        del logits_NV, sums
        return found, loss
