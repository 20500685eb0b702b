"""A second device that holds stages' parameters nearer to the first than the host does.

Owns a buffer there for as many stages as have room, and what each of them holds. Parameters reach
it over its own link, as soon as the step before has written them, and the first device from it, in
both passes: so its link has state and what is written out, and no parameters. Knows nothing of
compute. Invariants: a buffer is filled again only behind the last copy from it; what it holds is
known by the base that it was filled from, so that another base is brought anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trainer.device import Device
from trainer.device_lanes import Lane, Lanes, Mark
from trainer.options import EngineOptions
from trainer.pipeline.shapes import ITEM_BYTES, StageShape

# Of what is free there; the rest is left to whoever else uses that device.
SHARE = 2


class Base(Protocol):
    """The shards of the commit that a step begins from."""

    def elements(self, shard: str) -> Tensor:
        """Give a shard's elements in host memory."""
        ...

    def written(self, shard: str) -> Mark | None:
        """Give the mark behind which a shard may be read."""
        ...


@dataclass(kw_only=True)
class _Held:
    buffer: Tensor
    base: Base | None = None
    filled: Mark | None = None
    read: Mark | None = None


def second_device(options: EngineOptions, device: Device) -> Device | None:
    """Give the device that stages pass through; None where none was asked for, or on a host."""
    if options.prefetch != "secondary-gpu" or device.is_host:
        return None
    return device.second()


class Peer:
    """Stages on a second device."""

    def __init__(self, lanes: Lanes, shapes: Mapping[str, StageShape], device: Device) -> None:
        self._lanes = lanes
        memory = device.memory_bytes()
        room = sum(ITEM_BYTES * s.params.count for s in shapes.values())
        if memory is not None:
            room = min(room, memory[0] // SHARE)
        self._held: dict[str, _Held] = {}
        for name, shape in shapes.items():
            room -= ITEM_BYTES * shape.params.count
            if room >= 0:
                buffer = torch.empty(shape.params.count, device=device.torch_device)
                self._held[name] = _Held(buffer=buffer)
        self.copies = 0

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def bring(self, base: Base, names: Iterable[str]) -> None:
        """Ask for the copies of these stages from the host, each as soon as it is written."""
        for name in names:
            held = self._held.get(name)
            if held is None or held.base is base:
                continue
            shard = f"params/{name}"
            self._lanes.wait(Lane.PEER_IN, held.read)
            self._lanes.wait(Lane.PEER_IN, base.written(shard))
            with self._lanes.on(Lane.PEER_IN):
                held.buffer.copy_(base.elements(shard), non_blocking=True)
            held.base, held.filled = base, self._lanes.mark(Lane.PEER_IN)
            self.copies += 1

    def send(self, base: Base, name: str, target: Tensor) -> None:
        """Copy a stage to the first device; PARAMS_IN goes on when it is there."""
        self.bring(base, [name])
        held = self._held[name]
        self._lanes.wait(Lane.PEER_OUT, held.filled)
        # The copy runs in the lane of the device that it comes from, and the other one waits.
        with self._lanes.on(Lane.PEER_OUT), self._lanes.on(Lane.PARAMS_IN, f"parameters {name}"):
            target.copy_(held.buffer, non_blocking=True)
        held.read = self._lanes.mark(Lane.PEER_OUT)

    def settle(self) -> None:
        """Wait for every copy, and forget what is held: the store may have its images back."""
        for lane in (Lane.PEER_IN, Lane.PEER_OUT):
            self._lanes.arrive(self._lanes.mark(lane, for_host=True))
        for held in self._held.values():
            held.base = None
