"""One forward and one backward pass: every shard's finished gradients, from the head down.

Owns what happens to a gradient between its last term and its use: the loss scale is taken out, the
normaliser's factor is put on, its norms are taken. Knows nothing of updates or staging. Invariants:
all of that happens in fp32, after the sum; a gradient that is not finite is never handed out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from trainer.backward import StageGradients, replay_backward
from trainer.clipping import check_finite, tensor_norms, total_norm
from trainer.errors import GradientOverflowError, NonFiniteError
from trainer.forward import bring_in, trace_forward
from trainer.gradients import taken
from trainer.head import HeadGradients, HeadWork, head_backward
from trainer.model.stages import Stage
from trainer.residency import ShardWindow
from trainer.step_model import StepModel
from trainer.tape import Compute, Tape
from trainer.tokens import Tokens


class GradientPass:
    """`run` yields gradients; `loss` and `norms` are known when it ends.

    loss_scale: the loss is multiplied by it before the backward pass, so that fp16 gradients do not
    underflow; a power of two, so that taking it out again is exact. factors: what each shard's
    gradients are multiplied by, 1 where none is given. kind: of the shards that have gradients.
    window: None where a pass brings shards in by itself.
    """

    kind: ClassVar[str] = "params"

    def __init__(
        self,
        model: StepModel,
        window: ShardWindow | None,
        compute: Compute,
        *,
        loss_scale: float = 1.0,
        factors: Mapping[str, float] | None = None,
    ) -> None:
        self.loss = math.nan
        self.norms: dict[str, Tensor] = {}
        self._model = model
        self._window = window
        self._compute = compute
        self._loss_scale = loss_scale
        self._factors = factors or {}
        self._head_work: HeadWork | None = None

    def run(self, batches: Sequence[Tokens]) -> Iterator[StageGradients]:
        """Yield each shard's gradients while its parameters are in.

        Raises:
            NonFiniteError: the loss or a gradient is not finite.
            GradientOverflowError: a gradient is not finite, and the loss was scaled.
        """
        model, window = self._model, self._window
        assert window is not None
        self._compute = self._compute.knowing(documents=[batch.documents for batch in batches])
        tapes = trace_forward(
            model.trunk,
            window,
            self._compute,
            [batch.ids for batch in batches],
            keep_activations=model.options.activations == "keep",
        )
        with window.take(f"params/{model.head.name}") as view:
            found = self._head(bring_in(model.head, view, self._compute), tapes, batches)
            if not model.tied:
                # Nothing here names what is handed out: who takes gradients is their only holder.
                yield self._finished(
                    StageGradients(stage=model.head, view=view, gradients=taken(found.params))
                )
        start = found.params if model.tied else None
        yield from map(
            self._finished,
            replay_backward(model.trunk, window, self._compute, tapes, found.hidden, start),
        )

    def total_norm(self) -> Tensor:
        """Give the norm over the model, tensors in forward order."""
        return total_norm([self.norms[stage.name] for stage in self._model.owners()])

    def _head(
        self, params: Mapping[str, Tensor], tapes: list[Tape], batches: Sequence[Tokens]
    ) -> HeadGradients:
        valid_tokens = sum(batch.valid_count for batch in batches)
        with self._compute.clock.measure("head_kernel_seconds"):
            found = head_backward(
                self._model.head,
                params,
                tapes[-1].outputs,
                [batch.labels for batch in batches],
                valid_tokens=valid_tokens,
                chunk_tokens=self._model.options.lm_head_chunk_tokens,
                loss_scale=self._loss_scale,
                into=self._compute.new_boundary(),
                work=self._head_work,
            )
        self._note_loss(found.loss_sum, valid_tokens, tapes)
        tapes[-1].outputs.clear()
        return found

    def _note_loss(self, loss_sum: Tensor, valid_tokens: int, tapes: Sequence[Tape]) -> None:
        """Look at the loss, with what led to it still at hand."""
        self.loss = float(loss_sum) / valid_tokens
        if not math.isfinite(self.loss):
            raise _diverged(self._model.trunk, tapes, self.loss)

    def _finished(self, ready: StageGradients) -> StageGradients:
        self._measured(ready)
        self._check(ready)
        return ready

    def _measured(self, ready: StageGradients) -> StageGradients:
        """Put factors on a stage's gradients and take their norms, without waiting for a device."""
        name = ready.stage.name
        for multiplier in (1.0 / self._loss_scale, self._factors.get(name, 1.0)):
            if multiplier != 1.0:
                for gradient in ready.gradients.values():
                    gradient.mul_(multiplier)
        self.norms[name] = tensor_norms(ready.gradients)
        return ready

    def _check(self, ready: StageGradients) -> None:
        name = ready.stage.name
        try:
            check_finite(f"{self.kind}/{name}", ready.gradients, self.norms[name])
        except NonFiniteError as error:
            if self._loss_scale > 1.0:
                raise GradientOverflowError(
                    f"the gradient of {error.shard}/{error.tensor} overflowed at loss scale"
                    f" {self._loss_scale:g}: the batch is skipped",
                    shard=error.shard,
                    tensor=error.tensor,
                ) from error
            raise


def _diverged(trunk: Sequence[Stage], tapes: Sequence[Tape], loss: float) -> NonFiniteError:
    """Name the first stage whose output is not finite. No loss scale can be the cause of it."""
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
