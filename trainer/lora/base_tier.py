"""Where the frozen base waits between visits: in host memory, or on the disk it is stored on.

Owns the choice and its reason. Knows nothing of how stages are brought in. Neither changes a bit.
In memory every shard is read once; on the disk it is read again each time it is visited, twice a
step, so that the disk's kind decides whether training makes sense at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer.budget import CACHE_BYTES, existing_parent
from trainer.device import Device
from trainer.disk_kind import MEMORY, ROTATING, UNKNOWN, Disk, disk_kind
from trainer.errors import InputError
from trainer.host_memory import machine_memory
from trainer.lora.model import brought_bytes
from trainer.lora.stages import adapted
from trainer.model.adapter_settings import LoraSettings
from trainer.model.stages import build_stages
from trainer.options import EngineOptions
from trainer.recipe import Recipe, Settings
from trainer.recipe_options import pinned_budget_bytes
from trainer.sizes import in_bytes

RAM, DISK = "ram", "disk"
# What the store keeps in memory where the base is not to stay: the adapters and their state.
DISK_CACHE_BYTES = 64 << 20
# Locked for a moment, to see that it can be: some hundredths of a second.
PROBE_BYTES = 64 << 20
FORCE = "--disk-kind nvme, ssd or rotating says what it is"


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseTier:
    """kind: `ram` or `disk`; base_bytes: what waits there; reason: for people."""

    kind: str
    base_bytes: int
    reason: str
    disk: Disk

    @property
    def cache_bytes(self) -> int:
        """Give what the store keeps in memory."""
        return CACHE_BYTES + self.base_bytes if self.kind == RAM else DISK_CACHE_BYTES


def base_tier(recipe: Recipe, lora: LoraSettings, settings: Settings, store: Path) -> BaseTier:
    """Choose for this machine, as it is now; InputError where nothing that was asked for goes."""
    device = Device.from_name(recipe.device)
    room = machine_memory()[1]
    if not device.is_host:
        room = min(room, lockable_bytes(device, pinned_budget_bytes(settings)))
    disk = disk_kind(existing_parent(store))
    if settings.disk_kind != "auto":
        disk = Disk(kind=settings.disk_kind, why="as --disk-kind says")
    size = waiting_bytes(recipe, lora)
    return chosen_tier(settings.base_tier, size, room, disk, is_locked=not device.is_host)


def lockable_bytes(device: Device, budget_bytes: int) -> int:
    """Give the budget of page-locked memory if a piece of it can be locked now; else nothing."""
    size = min(PROBE_BYTES, budget_bytes)
    return budget_bytes if size and device.host_buffer(size, "a probe").is_pinned() else 0


def waiting_bytes(recipe: Recipe, lora: LoraSettings) -> int:
    """Give what the base takes in the dtype that computes, packed where it is packed."""
    dtype = EngineOptions(dtype=recipe.dtype).torch_dtype
    stages = build_stages(recipe.model)
    return sum(brought_bytes(adapted(stage, lora), dtype) for stage in stages)


def chosen_tier(asked: str, size: int, room: int, disk: Disk, *, is_locked: bool) -> BaseTier:
    """Choose by size and room alone; see `base_tier`."""
    what = "that may be page-locked" if is_locked else "that is free"
    fits = size <= room
    told = f"{in_bytes(size)} of the {in_bytes(room)} of memory {what}"
    if asked == RAM and not fits:
        raise InputError(f"--base-tier ram: the base takes {told}: give auto or disk")
    if asked == RAM or (asked == "auto" and fits):
        why = "asked for" if asked == RAM else "it fits"
        return BaseTier(kind=RAM, base_bytes=size, reason=f"{why}: {told}", disk=disk)
    why = "asked for" if asked == DISK else f"memory is too small: {told}"
    if disk.kind == UNKNOWN:
        raise InputError(
            f"--base-tier {asked}: the base would be read from the store's disk twice a step"
            f" ({why}), and its kind is not known ({disk.why}): {FORCE}, or give --base-tier ram"
        )
    slow = "; a rotating disk: expect minutes a step" if disk.kind == ROTATING else ""
    on = "memory" if disk.kind == MEMORY else f"{disk.kind} ({disk.why})"
    return BaseTier(kind=DISK, base_bytes=size, reason=f"{why}; read from {on}{slow}", disk=disk)


def tier_text(tier: BaseTier) -> str:
    """Say where the base waits, and why."""
    return f"base in {'memory' if tier.kind == RAM else 'the store alone'}: {tier.reason}"
