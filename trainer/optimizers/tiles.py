"""One shard's update, cut into tiles of bounded size.

Owns the old and new values of a shard and how they are walked over. Knows no update rule. Cutting
changes no bit of an element-wise rule as long as tiles are whole multiples of the kernels' vector
width. Invariant: old values are only read, new values only written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from shardb import TensorSpec


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
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A run of elements of one tensor: sources and targets are the parameter, then its state."""

    sources: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    gradient: Tensor


def fp32_state(specs: Mapping[str, TensorSpec], states: Sequence[str]) -> dict[str, TensorSpec]:
    """Give an fp32 tensor of each parameter's shape for each name of state."""
    return {
        f"{name}.{state}": TensorSpec(dtype="F32", shape=spec.shape)
        for name, spec in specs.items()
        for state in states
    }


def tiles(
    shard: ShardUpdate, names: Sequence[str], states: Sequence[str], tile_elements: int
) -> Iterator[list[Piece]]:
    """Cut tensors into pieces and pack pieces into tiles of at most `tile_elements`."""
    tile: list[Piece] = []
    room = tile_elements
    for name in names:
        for piece in _pieces(shard, name, states, tile_elements):
            if piece.gradient.numel() > room:
                yield tile
                tile, room = [], tile_elements
            tile.append(piece)
            room -= piece.gradient.numel()
    if tile:
        yield tile


def split_by_decay(
    shard: ShardUpdate, *, weight_decay: float, matrices_only: bool
) -> list[tuple[list[str], float]]:
    """Give the tensors to be decayed and those to be spared, each with its weight decay."""
    decayed: list[str] = []
    spared: list[str] = []
    for name, gradient in shard.gradients.items():
        (spared if matrices_only and gradient.ndim < 2 else decayed).append(name)
    return [(decayed, weight_decay), (spared, 0.0)]


def _pieces(
    shard: ShardUpdate, name: str, states: Sequence[str], tile_elements: int
) -> Iterator[Piece]:
    keys = [f"{name}.{state}" for state in states]
    old = [shard.params[name], *(shard.state[key] for key in keys)]
    new = [shard.new_params[name], *(shard.new_state[key] for key in keys)]
    gradient = shard.gradients[name].view(-1)
    for start in range(0, gradient.numel(), tile_elements):
        run = slice(start, start + tile_elements)
        yield Piece(
            sources=tuple(tensor.view(-1)[run] for tensor in old),
            targets=tuple(tensor.view(-1)[run] for tensor in new),
            gradient=gradient[run],
        )
