"""Stages whose updates run on the processor, from the images of the base into staged ones.

Owns the gradients' way to the host and the updates there, in a thread of their own. Optimizer state
of such a stage never comes to the device, and what is staged is written where it is. Knows nothing
of passes. Invariants: a stage's gradients have memory of their own, page-locked once, so that no
update waits for another's; whoever wants to read what was staged arrives at its mark first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from trainer.device_lanes import Lane, Lanes, Mark
from trainer.pipeline.sealing import HostMark, Sealer
from trainer.pipeline.shapes import ITEM_BYTES, StageShape
from trainer.pipeline.writing import Target
from trainer.step_model import StepModel

WHAT = "gradients for the processor"


class HostSide:
    """The stages of a run that are updated here."""

    def __init__(
        self,
        lanes: Lanes,
        model: StepModel,
        sealer: Sealer,
        shapes: Mapping[str, StageShape],
    ) -> None:
        self._lanes = lanes
        self._sealer = sealer
        self._gradients = {
            name: model.device.host_buffer(ITEM_BYTES * shape.count, WHAT).view(torch.float32)
            for name, shape in shapes.items()
            if model.options.updates_on_host(name)
        }

    def __contains__(self, name: str) -> bool:
        return name in self._gradients

    def __iter__(self) -> Iterator[str]:
        return iter(self._gradients)

    def gradients(self, name: str) -> Tensor:
        """Give where a stage's gradients are on the host."""
        return self._gradients[name]

    def update(
        self,
        name: str,
        gradients: Tensor,
        ready: Mark | None,
        base: tuple[Tensor, Tensor],
        targets: Sequence[Target],
        update: Callable[[], None],
    ) -> HostMark:
        """Ask for a stage's update behind `ready`: copied from its base, then in place.

        base: parameters and state; update: makes the update in what `targets` hold.
        """
        here = self._gradients[name]
        self._lanes.wait(Lane.OUT, ready)
        with self._lanes.on(Lane.OUT, f"gradients {name}"):
            here.copy_(gradients[: len(here)], non_blocking=True)
        arrived = self._lanes.mark(Lane.OUT, for_host=True)

        def work() -> None:
            self._lanes.arrive(arrived)
            for target, old in zip(targets, base, strict=True):
                target.elements.copy_(old)
            update()
            for target in targets:
                target.staged.seal()

        return self._sealer.run(work)
