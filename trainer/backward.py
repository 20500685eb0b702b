"""The backward pass: each stage's tape run in reverse order, its parameters brought in again.

Owns that order and the gradients between stages. Knows nothing of clipping or optimizers: it hands
out each stage's gradients while that stage is still in. Layer-major, like the forward trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from shardb import ShardView
from trainer.forward import bring_in
from trainer.gradients import GradientSum, taken
from trainer.model.stages import Stage
from trainer.placement import Boundary
from trainer.residency import ShardWindow
from trainer.tape import Compute, Tape


@dataclass(frozen=True, kw_only=True, slots=True)
class StageGradients:
    """The finished gradients of a stage, and the view of the parameters they belong to."""

    stage: Stage
    view: ShardView
    gradients: dict[str, Tensor]


def replay_backward(
    trunk: Sequence[Stage],
    window: ShardWindow,
    compute: Compute,
    tapes: list[Tape],
    gradients: Boundary,
    start: dict[str, Tensor] | None,
) -> Iterator[StageGradients]:
    """Yield each stage's gradients from the last stage to the first.

    gradients: those of the last stage's outputs; used up. `start` is what the first stage's
    gradients are added to: those of a head that shares its weight. The tapes are used up: each is
    dropped as soon as its stage is done, and so are a stage's gradients when they are handed out.
    """
    for stage in reversed(trunk):
        tape = tapes.pop()
        total = GradientSum(None if tapes else start)
        with window.take(f"params/{stage.name}") as view:
            params = bring_in(stage, view, compute)
            with compute.clock.measure("backward_kernel_seconds"):
                tape.backward(params, gradients, total)
            del params, tape
            yield StageGradients(stage=stage, view=view, gradients=taken(total.gradients))
