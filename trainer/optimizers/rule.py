"""What the engine asks of an optimizer: the state of a shard, and the shard's next values.

A rule is a frozen set of numbers; everything that changes lives in the shard's state. Knows nothing
of stores or stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from shardb import TensorSpec
from trainer.device import Device
from trainer.optimizers.tiles import ShardUpdate


class UpdateRule(Protocol):
    """An optimizer, one shard at a time."""

    def state_specs(self, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """Give the state that belongs to parameters of these specs; it starts at zero."""
        ...

    def update(self, device: Device, shard: ShardUpdate) -> None:
        """Write the shard's next values; gradients are scaled in place and used up."""
        ...
