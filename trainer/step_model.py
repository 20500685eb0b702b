"""What stays the same from step to step: the stages, the settings, the rule and the device.

Owns the order of the shards that a step visits. Knows nothing of transactions or batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.device import Device
from trainer.model.compiled import Blocks
from trainer.model.stages import Stage
from trainer.optimizers.rule import UpdateRule
from trainer.options import EngineOptions
from trainer.placement_places import ActivationPlaces
from trainer.tape import Compute
from trainer.timing import StepClock
from trainer.tokens import Tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class StepModel:
    """A model as a step sees it."""

    trunk: Sequence[Stage]
    head: Stage
    tied: bool
    options: EngineOptions
    optimizer: UpdateRule
    device: Device
    places: ActivationPlaces
    blocks: Blocks | None = None

    def compute(self, clock: StepClock) -> Compute:
        """Give where and how stages run, timed by `clock`."""
        return Compute(
            device=self.device,
            dtype=self.options.torch_dtype,
            clock=clock,
            new_boundary=self.places.new_boundary,
            blocks=self.blocks,
        )

    def prepare(self, batches: Sequence[Tokens]) -> None:
        """Take what a step on `batches` needs beside memory, before anything is computed."""
        self.places.prepare(
            len(self.trunk),
            [batch.ids for batch in batches],
            width=self.head.config.hidden_size,
            dtype=self.options.torch_dtype,
        )

    def owners(self) -> list[Stage]:
        """Give the stages that own shards, in forward order."""
        return [*self.trunk] if self.tied else [*self.trunk, self.head]

    def gradient_order(self) -> list[str]:
        """Give the shards of a pass that takes gradients and updates nothing."""
        order = [f"params/{stage.name}" for stage in self.trunk]
        if self.tied:
            order.append(f"params/{self.head.name}")
        return order + [f"params/{stage.name}" for stage in reversed(self.owners())]

    def step_order(self) -> list[str]:
        """Give the shards of a step in the order in which `TrainStep` takes them."""
        backward = [stage.name for stage in reversed(self.owners())]
        if self.options.grad_clip_mode == "global":
            again = [f"{kind}/{name}" for name in backward for kind in ("params", "optim")]
            return self.gradient_order() + again
        forward = self.gradient_order()[: -len(backward)]
        return forward + [f"{kind}/{name}" for name in backward for kind in ("params", "optim")]
