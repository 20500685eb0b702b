"""Lion (Chen et al. 2023, arXiv:2302.06675, algorithm 2) over one shard, in tiles.

Owns the rule's settings and the name of its state. With gradient g, momentum m and parameter p:

    c = beta1 m + (1 - beta1) g
    p = p (1 - rate decay) - rate sign(c)
    m = beta2 m + (1 - beta2) g

It keeps half of AdamW's state, so a shard moves two thirds of the bytes. Knows nothing of stores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardb import TensorSpec
from trainer.device import Device
from trainer.optimizers.tiles import Piece, ShardUpdate, fp32_state, split_by_decay, tiles

TILE_ELEMENTS = 1 << 20
STATE_NAMES = ("exp_avg",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lion:
    """Settings of the rule; `decay_matrices_only` spares vectors (norms, biases) the decay."""

    beta1: float
    beta2: float
    weight_decay: float
    decay_matrices_only: bool = False

    def state_specs(self, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """Give the state that belongs to parameters of these specs; it starts at zero."""
        return fp32_state(specs, STATE_NAMES)

    def update(self, device: Device, shard: ShardUpdate) -> None:
        """Write the shard's next values; gradients are scaled in place and used up."""
        parts = split_by_decay(
            shard, weight_decay=self.weight_decay, matrices_only=self.decay_matrices_only
        )
        for names, weight_decay in parts:
            for tile in tiles(shard, names, STATE_NAMES, TILE_ELEMENTS):
                self._update_tile(device, shard, tile, weight_decay)

    def _update_tile(
        self, device: Device, shard: ShardUpdate, tile: list[Piece], weight_decay: float
    ) -> None:
        sources = [t for piece in tile for t in piece.sources]
        targets = [t for piece in tile for t in piece.targets]
        values, gradients = device.open_tile(sources, targets, [piece.gradient for piece in tile])
        rate = shard.learning_rate
        for parameter, momentum, gradient in zip(
            values[0::2], values[1::2], gradients, strict=True
        ):
            if shard.gradient_scale != 1.0:
                gradient.mul_(shard.gradient_scale)
            parameter.mul_(1.0 - rate * weight_decay)
            direction = momentum.mul(self.beta1).add_(gradient, alpha=1.0 - self.beta1).sign_()
            parameter.add_(direction, alpha=-rate)
            momentum.mul_(self.beta2).add_(gradient, alpha=1.0 - self.beta2)
        device.close_tile(values, targets)
