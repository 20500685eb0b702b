"""The loss on held-out rows, and logits: forward passes only, streamed like training.

Knows nothing of gradients or optimizers. Reads from a transaction (staged values included) or from
a read view of any commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from trainer.errors import InputError
from trainer.forward import bring_in, pass_through
from trainer.head import head_loss_sum
from trainer.model.stages import Stage
from trainer.prefetch import Prefetch
from trainer.residency import ShardReader, ShardWindow
from trainer.tape import Compute
from trainer.tokens import Tokens

# Batches that pass a stage together: a stage is brought in once for all of them.
GROUP_BATCHES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalResult:
    """Mean loss over valid tokens, and how many tokens and batches it was taken over."""

    loss: float
    tokens: int
    batches: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluator:
    """Forward passes of one model over shards of any reader."""

    trunk: Sequence[Stage]
    head: Stage
    compute: Compute
    chunk_tokens: int
    prefetch: Prefetch

    def evaluate(self, reader: ShardReader, batches: Iterable[Tokens]) -> EvalResult:
        """Give the mean loss; InputError when there is no valid token at all."""
        return mean_loss(batches, partial(self._group_loss, reader))

    def logits(self, reader: ShardReader, ids: Tensor, *, last_only: bool = False) -> Tensor:
        """Score ids [B, T]: [B, T, V] in the compute dtype; only the last position if asked."""
        with self._window(reader) as window:
            [hidden] = pass_through(self.trunk, window, self.compute, [ids])
            with torch.no_grad(), window.take(f"params/{self.head.name}") as view:
                params = bring_in(self.head, view, self.compute)
                return self.head.forward(params, hidden[:, -1:] if last_only else hidden)

    def _group_loss(self, reader: ShardReader, group: Sequence[Tokens]) -> float:
        with self._window(reader) as window:
            ids = [batch.ids for batch in group]
            compute = self.compute.knowing(documents=[batch.documents for batch in group])
            hidden = pass_through(self.trunk, window, compute, ids)
            with window.take(f"params/{self.head.name}") as view:
                params = bring_in(self.head, view, self.compute)
                labels = [batch.labels for batch in group]
                return float(
                    head_loss_sum(self.head, params, hidden, labels, chunk_tokens=self.chunk_tokens)
                )

    def _window(self, reader: ShardReader) -> ShardWindow:
        order = [f"params/{stage.name}" for stage in (*self.trunk, self.head)]
        return ShardWindow(reader, order, prefetch=self.prefetch, clock=self.compute.clock)


def mean_loss(
    batches: Iterable[Tokens], group_loss: Callable[[Sequence[Tokens]], float]
) -> EvalResult:
    """Give the mean over all tokens; `group_loss` sums the loss of batches that pass together.

    Raises:
        InputError: there is no valid token at all.
    """
    loss_sum, tokens, count = 0.0, 0, 0
    iterator = iter(batches)
    while group := list(islice(iterator, GROUP_BATCHES)):
        loss_sum += group_loss(group)
        tokens += sum(batch.valid_count for batch in group)
        count += len(group)
    if tokens == 0:
        raise InputError(
            "validation has no token to measure: give --val-data-dir rows whose labels count"
        )
    return EvalResult(loss=loss_sum / tokens, tokens=tokens, batches=count)
