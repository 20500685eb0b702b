"""How this process keeps its memory between steps, and how much it has.

Owns one setting of the C library and one number of the kernel. Knows nothing of what
the memory is for.
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
