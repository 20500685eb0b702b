"""AdamW (Loshchilov and Hutter 2019, decoupled weight decay) over one shard, in tiles.

Owns the update rule's settings and the names of its state. Knows nothing of stores or of other
shards. The arithmetic is PyTorch's own fused kernel; it works element by element, so cutting a
shard into tiles changes no bit as long as tiles are whole multiples of the kernel's vector width.
Invariant: old values are only read, new values only written; no copy of a whole shard is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from shardb import TensorSpec
from trainer.device import Device
from trainer.optimizers.tiles import Piece, ShardUpdate, fp32_state, split_by_decay, tiles

__all__ = ["AdamW", "ShardUpdate"]

# Four tiles (parameter, gradient, two moments) are 16 MiB: small on any device, and large enough
# that the cost of a call, about 40 µs, is a few per cent of the work.
TILE_ELEMENTS = 1 << 20
STATE_NAMES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW:
    """Settings of the rule; `decay_matrices_only` spares vectors (norms, biases) the decay."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decay_matrices_only: bool = False

    def state_specs(self, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """Give the state that belongs to parameters of these specs; it starts at zero."""
        return fp32_state(specs, STATE_NAMES)

    def update(self, device: Device, shard: ShardUpdate) -> None:
        """Write the shard's next values; gradients are scaled in place and used up."""
        assert shard.step >= 1, "bias correction counts steps from 1"
        parts = split_by_decay(
            shard, weight_decay=self.weight_decay, matrices_only=self.decay_matrices_only
        )
        for names, weight_decay in parts:
            for tile in tiles(shard, names, STATE_NAMES, TILE_ELEMENTS):
                self._update_tile(device, shard, tile, weight_decay)

    def apply(
        self,
        params: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        *,
        decayed: Sequence[bool],
        step: Tensor,
        learning_rate: float,
    ) -> None:
        """Update tensors in place, on the device where they lie; `step` counts from 1, fp32.

        decayed: which of them are matrices, where only those are decayed.
        """
        spared = self.decay_matrices_only
        for weight_decay, wanted in ((self.weight_decay, True), (0.0, False)):
            chosen = [i for i, d in enumerate(decayed) if (d or not spared) is wanted]
            if chosen:
                torch._fused_adamw_(
                    [params[i] for i in chosen],
                    [gradients[i] for i in chosen],
                    [states[0][i] for i in chosen],
                    [states[1][i] for i in chosen],
                    [],
                    [step] * len(chosen),
                    amsgrad=False,
                    maximize=False,
                    beta1=self.beta1,
                    beta2=self.beta2,
                    lr=learning_rate,
                    weight_decay=weight_decay,
                    eps=self.eps,
                )

    def _update_tile(
        self, device: Device, shard: ShardUpdate, tile: list[Piece], weight_decay: float
    ) -> None:
        sources = [t for piece in tile for t in piece.sources]
        targets = [t for piece in tile for t in piece.targets]
        values, gradients = device.open_tile(sources, targets, [piece.gradient for piece in tile])
        if shard.gradient_scale != 1.0:
            for gradient in gradients:
                gradient.mul_(shard.gradient_scale)
        # The function counts the step up before it uses it.
        before = torch.full((), float(shard.step - 1), device=device.torch_device)
        adamw(
            values[0::3],
            gradients,
            values[1::3],
            values[2::3],
            [],
            [before.clone() for _ in tile],
            fused=True,
            amsgrad=False,
            maximize=False,
            beta1=self.beta1,
            beta2=self.beta2,
            lr=shard.learning_rate,
            weight_decay=weight_decay,
            eps=self.eps,
        )
        device.close_tile(values, targets)
