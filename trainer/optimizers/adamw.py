"""AdamW (Loshchilov and Hutter 2019, decoupled weight decay) over one shard, in tiles.

Owns the update rule's settings and the names of its state. Knows nothing of stores or of other
shards. The arithmetic is PyTorch's own fused kernel; it works element by element, so cutting a
shard into tiles changes no bit as long as tiles are whole multiples of the kernel's vector width.
Invariant: old values are only read, new values only written; no copy of a whole shard is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from shardb import TensorSpec
from trainer.device import Device

# Four tiles (parameter, gradient, two moments) are 16 MiB: small on any device, and large enough
# that the cost of a call, about 40 µs, is a few per cent of the work.
TILE_ELEMENTS = 1 << 20
STATE_NAMES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardUpdate:
    """One shard's old values (read only), new values (written), and what moves one to the other."""

    params: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    new_params: Mapping[str, Tensor]
    new_state: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    gradient_scale: float
    learning_rate: float
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """A run of elements of one tensor: sources and targets are (parameter, moment, moment)."""

    sources: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    gradient: Tensor


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
        return {
            f"{name}.{state}": TensorSpec(dtype="F32", shape=spec.shape)
            for name, spec in specs.items()
            for state in STATE_NAMES
        }

    def update(self, device: Device, shard: ShardUpdate) -> None:
        """Write the shard's next values; gradients are scaled in place and used up."""
        assert shard.step >= 1, "bias correction counts steps from 1"
        decayed: list[str] = []
        spared: list[str] = []
        for name, gradient in shard.gradients.items():
            spare = self.decay_matrices_only and gradient.ndim < 2
            (spared if spare else decayed).append(name)
        for names, weight_decay in ((decayed, self.weight_decay), (spared, 0.0)):
            for tile in _tiles(shard, names):
                self._update_tile(device, shard, tile, weight_decay)

    def _update_tile(
        self, device: Device, shard: ShardUpdate, tile: list[_Piece], weight_decay: float
    ) -> None:
        sources = [t for piece in tile for t in piece.sources]
        targets = [t for piece in tile for t in piece.targets]
        values, gradients = device.open_tile(sources, targets, [piece.gradient for piece in tile])
        if shard.gradient_scale != 1.0:
            for gradient in gradients:
                gradient.mul_(shard.gradient_scale)
        # The function counts the step up before it uses it.
        before = torch.tensor(float(shard.step - 1), device=device.torch_device)
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


def _tiles(shard: ShardUpdate, names: list[str]) -> Iterator[list[_Piece]]:
    """Cut tensors into pieces and pack pieces into tiles of at most TILE_ELEMENTS."""
    tile: list[_Piece] = []
    room = TILE_ELEMENTS
    for name in names:
        for piece in _pieces(shard, name):
            if piece.gradient.numel() > room:
                yield tile
                tile, room = [], TILE_ELEMENTS
            tile.append(piece)
            room -= piece.gradient.numel()
    if tile:
        yield tile


def _pieces(shard: ShardUpdate, name: str) -> Iterator[_Piece]:
    states = [f"{name}.{state}" for state in STATE_NAMES]
    old = [shard.params[name], *(shard.state[state] for state in states)]
    new = [shard.new_params[name], *(shard.new_state[state] for state in states)]
    gradient = shard.gradients[name].view(-1)
    for start in range(0, gradient.numel(), TILE_ELEMENTS):
        run = slice(start, start + TILE_ELEMENTS)
        yield _Piece(
            sources=tuple(tensor.view(-1)[run] for tensor in old),
            targets=tuple(tensor.view(-1)[run] for tensor in new),
            gradient=gradient[run],
        )
