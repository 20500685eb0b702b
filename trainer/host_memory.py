"""How this process keeps its memory between steps, and how much it has.

Owns one setting of the C library and the kernel's numbers. Knows nothing of what the memory is
for.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

# Of <malloc.h>: the size above which memory comes from the system and returns to it at once, and
# the free size at which the heap shrinks.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER_TRIM = -1
_LARGEST_BYTES = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Ask the C library to keep freed memory for this process; False where it cannot be asked.

    A step frees and takes the same activations and gradients as the one before. By default glibc
    gives large blocks back to the system, and every step pays for fresh pages: 3 to 7 % of a step
    of the `demo` preset on a CPU. The peak stays the same; between peaks the process does not
    shrink. It holds for the whole process, so that only commands call it, never the library.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES) and mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM)
    )


def resident_bytes() -> int | None:
    """Give the memory that this process holds now, mapped files included; None if untold."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def machine_memory() -> tuple[int, int]:
    """Give total and available bytes of memory, within the limit of the control group."""
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available_bytes = _available_bytes(total_bytes)
    limit_bytes = _number_in(Path("/sys/fs/cgroup/memory.max"))
    if limit_bytes is not None and limit_bytes < total_bytes:
        total_bytes = limit_bytes
        available_bytes = min(available_bytes, limit_bytes)
    return total_bytes, available_bytes


def _available_bytes(total_bytes: int) -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return total_bytes
    values = dict(line.split(":", 1) for line in lines)
    return int(values["MemAvailable"].split()[0]) * 1024


def _number_in(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
