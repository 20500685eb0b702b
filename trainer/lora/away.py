"""Stages' inputs in host memory while a device computes, copied beside it both ways.

Owns the tape of one stage whose inputs are away. `trainer.pipeline.boundaries` owns the places and
the copies. Knows nothing of the order of stages. Invariant: what comes back has the bits that went
out; only the inputs of the stage in work, and one set of gradients, are on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from trainer.gradients import GradientSum
from trainer.model.stages import Stage
from trainer.pipeline.boundaries import Boundaries
from trainer.placement import Boundary
from trainer.tape import Compute, ReplayTape, leaves_of

# Inputs that are on the device ahead of their replay, one a micro-batch.
AHEAD = 2


class AwayTape(ReplayTape):
    """Keeps a stage's inputs away; `hidden` holds them at first, and the outputs then.

    place: the stage's number in `boundaries`; None where nothing goes back through the stage.
    before: makes an input of what `hidden` holds, when its turn comes; None where it is one.
    """

    def __init__(
        self,
        stage: Stage,
        compute: Compute,
        params: Mapping[str, Tensor],
        hidden: list[Tensor],
        boundaries: Boundaries,
        place: int | None,
        *,
        before: Callable[[Tensor, int], Tensor] | None = None,
    ) -> None:
        self._boundaries = boundaries
        self._place = place
        super().__init__(stage, compute, params, ())
        for index, x in enumerate(hidden):
            if before is not None:
                x = before(x, index)
            hidden[index] = self._forward(params, x, index)
            if place is not None:
                boundaries.keep(place, index, x)
            del x
        self.outputs: Boundary = hidden

    def backward(
        self, params: Mapping[str, Tensor], gradients: Boundary, total: GradientSum
    ) -> None:
        """See `Tape`."""
        assert self._place is not None
        self.outputs.clear()
        leaves = leaves_of(params)
        for index in range(len(gradients)):
            x = self._boundaries.take(self._place, index)
            gradients[index] = self._back(x, index, leaves, gradients[index], total)
            del x
            self._boundaries.done()
