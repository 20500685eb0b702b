"""Shards of adapters and their state as one run of bytes, and a flat tensor of each kind in it.

Owns where everything lies: the bodies of the shards one behind the other, adapters first, each as
its object has it, so that a shard is one copy. Knows nothing of devices or updates. Invariant: a
flat tensor of state has the order of the flat tensor of adapters, element by element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardb import ShardView
from shardb.views import TensorImage

Key = tuple[str, str]
Shards = Mapping[str, TensorImage]
# Kernels may treat the last elements of a tensor otherwise: flat, they lie in the middle.
WHOLE_ELEMENTS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Bodies:
    """Where each shard begins in a run, in bytes."""

    starts: Mapping[str, int]
    bytes: int

    @classmethod
    def of(cls, shards: Shards) -> Bodies | None:
        """Give the run of shards; None where a tensor is not fp32, or of an odd size."""
        if not _are_flat([*shards.values()]):
            return None
        starts, end = {}, 0
        for name, shard in shards.items():
            starts[name] = end
            end += _body_bytes(shard)
        return cls(starts=starts, bytes=end)

    def tensors(self, shards: Shards, run: Tensor) -> dict[Key, Tensor]:
        """Give the tensors of a run by shard and name."""
        keys, sizes = _tensors(shards)
        pieces = torch.split(run.view(torch.float32), sizes)
        return {
            (shard, name): piece.view(shards[shard].specs[name].shape)
            for (shard, name), piece in zip(keys, pieces, strict=True)
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """All that a step updates.

    adapters, sizes: stage and name of every adapter, and its elements, in their order.
    state_places: for each kind of state, where each adapter's is among all state.
    """

    adapters: Sequence[Key]
    sizes: Sequence[int]
    state_sizes: Sequence[int]
    state_places: Mapping[str, Sequence[int]]
    bodies: Bodies

    @classmethod
    def of(cls, adapters: Mapping[str, ShardView], states: Mapping[str, ShardView]) -> Runs | None:
        """Give the run of shards by stage; None where state is not like adapters, in fp32."""
        keys, sizes = _tensors(adapters)
        state_keys, state_sizes = _tensors(states)
        bodies = Bodies.of(shards_of(adapters, states))
        if bodies is None:
            return None
        kinds = list(dict.fromkeys(name.rpartition(".")[2] for _, name in state_keys))
        found = {key: place for place, key in enumerate(state_keys)}
        places = {}
        for kind in kinds:
            wanted = [(stage, f"{name}.{kind}") for stage, name in keys]
            places[kind] = [found.pop(key, -1) for key in wanted]
            if [state_sizes[place] for place in places[kind]] != sizes:
                return None
        if found:
            return None
        return cls(
            adapters=keys,
            sizes=sizes,
            state_sizes=state_sizes,
            state_places=places,
            bodies=bodies,
        )

    @property
    def bytes(self) -> int:
        """Give the size of the run."""
        return self.bodies.bytes

    def flat_adapters(self, image: Tensor) -> Tensor:
        """Give all adapters as one row, in the run itself."""
        return image.view(torch.float32)[: sum(self.sizes)].view(1, -1)

    def flat_states(self, image: Tensor) -> dict[str, Tensor]:
        """Give copies of the state, one row a kind."""
        pieces = self._states(image)
        return {
            kind: torch.cat([pieces[place] for place in places]).view(1, -1)
            for kind, places in self.state_places.items()
        }

    def put_states(self, image: Tensor, flat: Mapping[str, Tensor]) -> None:
        """Write what `flat_states` gave back to its places."""
        pieces = self._states(image)
        for kind, places in self.state_places.items():
            rows = torch.split(flat[kind].view(-1), list(self.sizes))
            torch._foreach_copy_([pieces[place] for place in places], list(rows))

    def flat(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
        """Give tensors by stage and adapter as one row."""
        found = [tensors[stage][name].reshape(-1) for stage, name in self.adapters]
        return torch.cat(found).view(1, -1)

    def by_stage(self, row: Tensor) -> dict[str, Tensor]:
        """Give the part of each stage's adapters of a row of all, as views."""
        sizes: dict[str, int] = {}
        for (stage, _), size in zip(self.adapters, self.sizes, strict=True):
            sizes[stage] = sizes.get(stage, 0) + size
        return dict(zip(sizes, torch.split(row.view(-1), list(sizes.values())), strict=True))

    def _states(self, image: Tensor) -> tuple[Tensor, ...]:
        values = image.view(torch.float32)[sum(self.sizes) :]
        pieces: tuple[Tensor, ...] = torch.split(values, list(self.state_sizes))
        return pieces


def shards_of(
    adapters: Mapping[str, ShardView], states: Mapping[str, ShardView]
) -> dict[str, ShardView]:
    """Give shards by their names, adapters first, of views by stage."""
    found = {f"adapters/{stage}": view for stage, view in adapters.items()}
    return found | {f"optim/{stage}": view for stage, view in states.items()}


def body_of(image: TensorImage) -> NDArray[np.uint8]:
    """Give the bytes of a shard behind its header."""
    found: NDArray[np.uint8] = image.image[image.bytes - _body_bytes(image) :]
    return found


def _body_bytes(image: TensorImage) -> int:
    return sum(spec.bytes for spec in image.specs.values())


def _tensors(views: Shards) -> tuple[list[Key], list[int]]:
    """Give all tensors in the order in which they lie, and their elements."""
    keys, sizes = [], []
    for stage, view in views.items():
        for name in sorted(view.specs, key=view.layout.offsets.__getitem__):
            keys.append((stage, name))
            sizes.append(view.specs[name].bytes // 4)
    return keys, sizes


def _are_flat(views: Sequence[TensorImage]) -> bool:
    return all(
        spec.dtype == "F32" and spec.bytes % (4 * WHOLE_ELEMENTS) == 0
        for view in views
        for spec in view.specs.values()
    )
