"""Frozen stages on their way to a device, ahead of their use.

Owns the slots on the device, which stages stay there, and the order of copies. While a stage
computes the next one is copied; a packed one leaves its slot as soon as it is unpacked. Knows
nothing of what is computed. Invariants: weights travel one way; a slot is filled again only behind
its last use; a lease carries its slot's generation and gives nothing once that was given back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType

import torch
from torch import Tensor

from shardb import ShardView, torch_adaptor
from trainer.device import Device
from trainer.device_lanes import Lane, Lanes, Mark, lanes_of
from trainer.lora import nf4
from trainer.lora.away import AHEAD
from trainer.lora.forms import SlotForm
from trainer.lora.host_base import HostBase
from trainer.lora.recorded import Recorder
from trainer.lora.slots import Lease, Slot
from trainer.lora.small_copies import SmallCopies
from trainer.lora.stages import AdaptedStage, leased
from trainer.lora.unpacked import UnpackedMemory
from trainer.lora.waiting import OnHost
from trainer.residency import ShardReader

SLOTS = 2
HEAD = "lm_head"


@dataclass(kw_only=True, slots=True)
class _Resident:
    """A stage that stays on the device; good once `arrived` is reached."""

    buffer: Tensor
    form: SlotForm
    digest: str | None
    arrived: Mark | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Coming:
    """A stage on its way: where it is copied to, and the mark behind which it is there."""

    shard: str
    form: SlotForm
    slot: Slot
    arrived: Mark | None


class DeviceBase:
    """What lasts from pass to pass: slots, stages that stay, and copies in host memory.

    inputs_on_host: stages' inputs wait for their replay there as well.

    Raises nothing of its own: memory that is missing is an error of the device's allocator.
    """

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        *,
        poison: bool = False,
        keeps_host: bool = True,
        inputs_on_host: bool = False,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.poison = poison
        self.lanes: Lanes = lanes_of(device)
        self.host = HostBase(device, self.lanes, dtype, is_kept=keeps_host)
        self.copies = SmallCopies(device, self.lanes)
        self.recorder = Recorder(self.lanes)
        self.unpacked = UnpackedMemory(device.torch_device, dtype)
        self.boundaries: OnHost | None = None
        if inputs_on_host:
            self.boundaries = OnHost(self.lanes, device, slots=AHEAD, poison=poison)
        self.slots: list[Slot] = []
        self.copied_bytes = 0
        self.passes = 0
        self.resident_names: frozenset[str] = frozenset()
        self._residents: dict[str, _Resident] = {}
        self._views: dict[tuple[int, SlotForm], dict[str, Tensor]] = {}
        self._unpacks: dict[tuple[str, str | None], bool] = {}

    def keep(self, names: Sequence[str]) -> None:
        """Let these shards stay on the device from the next pass on."""
        self.resident_names = frozenset(names)
        for name in [n for n in self._residents if n not in self.resident_names]:
            del self._residents[name]

    def free_slot(self, size: int) -> Slot | None:
        """Give a slot that was given back; None where all are in use."""
        if not self.slots:
            self.slots = [Slot(self.memory(size)) for _ in range(SLOTS)]
        for slot in self.slots:
            if slot.is_free and slot.buffer.nbytes >= size:
                self.slots.remove(slot)
                self.slots.append(slot)
                return slot
        return None

    def tensors(self, slot: Slot, form: SlotForm) -> dict[str, Tensor]:
        """Give the tensors of a slot; views of one that is kept are made once."""
        if slot not in self.slots:
            return form.tensors(slot.buffer)
        key = (id(slot), form)
        if key not in self._views:
            self._views[key] = form.tensors(slot.buffer)
        return self._views[key]

    def is_unpacked(self, stage: AdaptedStage, view: ShardView) -> bool:
        """Say whether a stage computes with weights that are unpacked once a visit."""
        key = (view.name, view.digest)
        if key not in self._unpacks:
            self._unpacks[key] = stage.is_packed and nf4.computes_in(view, self.dtype)
        return self._unpacks[key]

    def unpack(self, stage: AdaptedStage, slot: Slot, lease: Lease) -> Mapping[str, Tensor]:
        """Give the weights of a packed stage as they compute."""
        places = self.unpacked.places()
        work = partial(nf4.unpacked, stage.inner, lease.tensors(), self.dtype, places)
        if places is None:
            return work()
        there = (slot.buffer.data_ptr(), next(iter(places.values())).data_ptr())
        self.recorder.repeat(("unpack", stage.config, *there), work)
        return places

    def memory(self, size: int) -> Tensor:
        """Take memory of the device."""
        return torch.empty(size, dtype=torch.uint8, device=self.device.torch_device)

    def copy_in(self, view: ShardView, buffer: Tensor) -> tuple[SlotForm, Mark | None]:
        """Ask for a shard's copy; give its form and the mark behind which it is there."""
        shard = self.host.shard(view)
        with self.lanes.on(Lane.PARAMS_IN, f"weights {view.name}"):
            buffer[: shard.form.bytes].copy_(shard.image, non_blocking=True)
        self.host.copied()
        self.copied_bytes += shard.form.bytes
        return shard.form, self.lanes.mark(Lane.PARAMS_IN)

    def resident(self, view: ShardView) -> _Resident:
        """Give a stage that stays, brought in where it is not there or is another one."""
        known = self._residents.get(view.name)
        if known is not None and known.digest == view.digest is not None:
            return known
        buffer = known.buffer if known is not None else self.memory(self.host.form(view).bytes)
        self.lanes.wait(Lane.PARAMS_IN, self.lanes.mark(Lane.COMPUTE))
        form, arrived = self.copy_in(view, buffer)
        found = _Resident(buffer=buffer, form=form, digest=view.digest, arrived=arrived)
        self._residents[view.name] = found
        return found


class Feed:
    """The stages of one pass, in `order`; tables are not brought in."""

    def __init__(
        self, base: DeviceBase, reader: ShardReader, order: Sequence[AdaptedStage]
    ) -> None:
        self._base = base
        self._lanes = base.lanes
        self._reader = reader
        self._read: dict[str, ShardView] = {}
        self._ahead: deque[_Coming] = deque()
        self.active_max = 1
        streamed = [s for s in order if not s.is_table and s.shard not in base.resident_names]
        self._unpacked = 0
        self._behind = self._shared(order)
        # What is no block has memory of its own, taken now: the lane of copies need not wait later.
        self._own = {s.shard: self._own_slot(s) for s in streamed if not s.is_block}
        self._uses = {name: sum(s.shard == name for s in streamed) for name in self._own}
        self._coming = deque(s.shard for s in streamed)
        self._lanes.wait(Lane.PARAMS_IN, self._lanes.mark(Lane.COMPUTE))

    def __enter__(self) -> Feed:
        for name in self._base.resident_names:
            self._base.resident(self._view(name))
        self._fetch()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert error is not None or not self._ahead, "a stage was not visited"
        for coming in self._ahead:
            coming.slot.free = coming.arrived
            coming.slot.is_free = True
        self._lanes.wait(Lane.COMPUTE, self._lanes.mark(Lane.PARAMS_IN))

    @contextmanager
    def visit(self, stage: AdaptedStage) -> Iterator[None]:
        """Have a stage's weights bound for a block."""
        if stage.is_table:
            view = self._view(stage.shard)
            rows_of = partial(self._base.copies.rows_of, view.digest)
            with leased(stage, Lease(torch_adaptor.tensors(view), None, rows_of=rows_of)):
                yield
            return
        slot, form = self._next(stage)
        lease = Lease(self._base.tensors(slot, form), slot)
        if not self._base.is_unpacked(stage, self._view(stage.shard)):
            with leased(stage, lease):
                yield
            self._give_back(stage.shard, slot)
            return
        weights = self._base.unpack(stage, slot, lease)
        self._give_back(stage.shard, slot)
        with leased(stage, Lease(weights, None, owned=True), poison=self._base.poison):
            yield
        self._left_unpacked()

    def _left_unpacked(self) -> None:
        """Let a stage into the memory of unpacked weights once none before it needs that."""
        self._unpacked += 1
        for name in [name for name, count in self._behind.items() if count == self._unpacked]:
            self._own[name].free = self._lanes.mark(Lane.COMPUTE)
            self._fetch()

    def _shared(self, order: Sequence[AdaptedStage]) -> dict[str, int]:
        """Give the head where it goes into the memory of unpacked weights, which it has no use for.

        Beside it: how many visits before its own unpack something. It is a copy that nothing hides,
        of memory that then is not taken beside blocks.
        """
        found: dict[str, int] = {}
        unpacked = 0
        for stage in order:
            if stage.is_block and self._base.is_unpacked(stage, self._view(stage.shard)):
                unpacked += 1
            elif stage.name == HEAD and self._base.unpacked.has_room(self._bytes_of(stage)):
                found[stage.shard] = unpacked
        return found

    def _bytes_of(self, stage: AdaptedStage) -> int:
        return self._base.host.form(self._view(stage.shard)).bytes

    def _next(self, stage: AdaptedStage) -> tuple[Slot, SlotForm]:
        if stage.shard in self._base.resident_names:
            kept = self._base.resident(self._view(stage.shard))
            self._lanes.wait(Lane.COMPUTE, kept.arrived)
            return Slot(kept.buffer), kept.form
        coming = self._ahead.popleft()
        assert coming.shard == stage.shard, (coming.shard, stage.shard)
        self._lanes.wait(Lane.COMPUTE, coming.arrived)
        return coming.slot, coming.form

    def _give_back(self, shard: str, slot: Slot) -> None:
        if shard in self._base.resident_names:
            slot.give_back(poison=False)
            return
        slot.give_back(poison=self._base.poison)
        slot.free = self._lanes.mark(Lane.COMPUTE)
        if shard in self._own:
            self._uses[shard] -= 1
            if not self._uses[shard]:
                del self._own[shard]
        self._fetch()

    def _fetch(self) -> None:
        while self._coming:
            view = self._view(self._coming[0])
            slot = self._slot_for(view)
            if slot is None:
                return
            self._coming.popleft()
            slot.is_free = False
            self._lanes.wait(Lane.PARAMS_IN, slot.free)
            form, arrived = self._base.copy_in(view, slot.buffer)
            self._ahead.append(_Coming(shard=view.name, form=form, slot=slot, arrived=arrived))
            self.active_max = max(self.active_max, 1 + len(self._ahead))

    def _slot_for(self, view: ShardView) -> Slot | None:
        own = self._own.get(view.name)
        if own is not None:
            return own if own.is_free and self._unpacked >= self._behind.get(view.name, 0) else None
        return self._base.free_slot(self._base.host.form(view).bytes)

    def _own_slot(self, stage: AdaptedStage) -> Slot:
        size = self._bytes_of(stage)
        if stage.shard in self._behind:
            return Slot(self._base.unpacked.room(size))
        return Slot(self._base.memory(size))

    def _view(self, name: str) -> ShardView:
        if name not in self._read:
            self._read[name] = self._reader.read(name)
        return self._read[name]
