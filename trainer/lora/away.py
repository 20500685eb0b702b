"""What stages left for their replay, and who keeps it: on the device, or away from it.

Owns the tapes of stages whose compiled blocks leave something beside their inputs, and of stages
whose inputs are in host memory; `trainer.lora.waiting` owns the places and the copies there. Knows
nothing of the order of stages. Invariants: what comes back has the bits that went out, and goes to
the micro-batch that left it; away, only what the stage in work takes, and one set of gradients, are
on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from trainer.gradients import GradientSum
from trainer.lora.stages import AdaptedStage
from trainer.lora.waiting import Waiting
from trainer.placement import Boundary
from trainer.tape import Compute, ReplayTape, leaves_of

# Visits' tensors that are on the device ahead of their replay, one a micro-batch.
AHEAD = 2


class LeavingTape(ReplayTape):
    """Keeps what compiled blocks leave for their replay beside their inputs."""

    def __init__(
        self,
        stage: AdaptedStage,
        compute: Compute,
        params: Mapping[str, Tensor],
        inputs: Boundary | Sequence[Tensor],
    ) -> None:
        self._binding = stage.binding
        self._left: list[list[Tensor]] = []
        super().__init__(stage, compute, params, inputs)

    def _forward(self, params: Mapping[str, Tensor], x: Tensor, index: int) -> Tensor:
        left: list[Tensor] = []
        self._left.append(left)
        with self._binding.leaving(left):
            return super()._forward(params, x, index)

    def _again(
        self, index: int, leaves: dict[str, Tensor], gradient: Tensor, total: GradientSum
    ) -> Tensor:
        with self._binding.leaving(self._left[index]):
            found = super()._again(index, leaves, gradient, total)
        self._left[index].clear()
        return found


class AwayTape(ReplayTape):
    """Keeps a stage's inputs away; `hidden` holds them at first, and the outputs then.

    place: the stage's number in `waiting`; None where nothing goes back through the stage.
    before: makes an input of what `hidden` holds, when its turn comes; None where it is one.
    leaves: compiled blocks leave something beside their inputs.
    """

    def __init__(
        self,
        stage: AdaptedStage,
        compute: Compute,
        params: Mapping[str, Tensor],
        hidden: list[Tensor],
        waiting: Waiting,
        place: int | None,
        *,
        before: Callable[[Tensor, int], Tensor] | None = None,
        leaves: bool = False,
    ) -> None:
        self._waiting = waiting
        self._place = place
        self._binding = stage.binding
        super().__init__(stage, compute, params, ())
        for index, x in enumerate(hidden):
            if before is not None:
                x = before(x, index)
            left: list[Tensor] | None = [] if leaves and place is not None else None
            with self._binding.leaving(left):
                hidden[index] = self._forward(params, x, index)
            if place is not None:
                waiting.keep(place, index, [x, *(left or ())])
            del x, left
        self.outputs: Boundary = hidden

    def backward(
        self, params: Mapping[str, Tensor], gradients: Boundary, total: GradientSum
    ) -> None:
        """See `Tape`."""
        assert self._place is not None
        self.outputs.clear()
        leaves = leaves_of(params)
        for index in range(len(gradients)):
            x, *left = self._waiting.take(self._place, index)
            with self._binding.leaving(left or None):
                gradients[index] = self._back(x, index, leaves, gradients[index], total)
            del x, left
            self._waiting.done()
