"""What kind of disk is below a folder: NVMe, another solid one, a rotating one, memory, or unknown.

Owns the reading of the kernel's tables. Knows nothing of why it is asked. Invariant: a kind is only
said where the kernel tells of the device itself: a virtual disk, a network or an overlay hides what
it lies on, and is unknown. Source: https://docs.kernel.org/admin-guide/abi-stable-files.html
(`queue/rotational`), proc(5) (`mountinfo`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from shardb.filesystem import RealFileSystem

NVME, SSD, ROTATING, MEMORY, UNKNOWN = "nvme", "ssd", "rotating", "memory", "unknown"
TOLD = (NVME, SSD, ROTATING)
SYSTEM, MOUNTS = Path("/sys"), Path("/proc/self/mountinfo")
# Names of disks that a hypervisor or the kernel makes of something else.
VIRTUAL_NAMES = ("vd", "xvd", "loop", "zram", "nbd", "rbd", "ram")
LAYERS_MAX = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """kind: one of the names above; why: how that is known, or why it is not."""

    kind: str
    why: str


def disk_kind(folder: Path, *, system: Path = SYSTEM, mounts: Path = MOUNTS) -> Disk:
    """Tell the kind of an existing folder's disk."""
    kind = RealFileSystem().kind(str(folder))
    if kind.startswith("memory:"):
        return Disk(kind=MEMORY, why=f"{kind.partition(':')[2]} is memory")
    if kind.startswith("network:"):
        return Disk(kind=UNKNOWN, why=f"{kind.partition(':')[2]} is a network file system")
    return device_kind(os.stat(folder).st_dev, system=system, mounts=mounts)


def device_kind(device: int, *, system: Path, mounts: Path) -> Disk:
    """Tell the kind of a device by its number."""
    number = f"{os.major(device)}:{os.minor(device)}"
    if (system / "dev" / "block" / number).exists():
        return _block_kind((system / "dev" / "block" / number).resolve())
    source, form = _mounted(number, mounts)
    if source.startswith("/dev/") and Path(source).is_block_device():
        below = os.stat(source).st_rdev
        return _block_kind(
            (system / "dev" / "block" / f"{os.major(below)}:{os.minor(below)}").resolve()
        )
    return Disk(kind=UNKNOWN, why=f"no block device is told of below {form or 'it'}")


def _block_kind(device: Path, layers: int = 0) -> Disk:
    """Tell the kind of a device by its folder; of one that is made of others, the slowest's."""
    if (device / "partition").exists():
        device = device.parent
    name = device.name
    below = sorted((device / "slaves").iterdir()) if (device / "slaves").is_dir() else []
    if below and layers < LAYERS_MAX:
        found = [_block_kind(each.resolve(), layers + 1) for each in below]
        return max(found, key=lambda disk: (*TOLD, UNKNOWN).index(disk.kind))
    if name.startswith(VIRTUAL_NAMES) or "virtual" in device.parts:
        return Disk(kind=UNKNOWN, why=f"{name} is a virtual disk: what it lies on is not told")
    if name.startswith("nvme"):
        return Disk(kind=NVME, why=name)
    turns = _text(device / "queue" / "rotational")
    if turns not in ("0", "1"):
        return Disk(kind=UNKNOWN, why=f"{name} does not say whether it rotates")
    return Disk(kind=ROTATING if turns == "1" else SSD, why=name)


def _mounted(number: str, mounts: Path) -> tuple[str, str]:
    """Give source and form of the file system with a device number."""
    for line in _text(mounts).splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2:3] == [number] and len(after.split()) > 1:
            form, source = after.split()[:2]
            return source, form
    return "", ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
