"""How much memory a process used at most, and how much can be had.

Owns the reading of proc(5). `getrusage` would not do: a process that was started by another begins
with that one's peak as its own.
"""

from __future__ import annotations

from pathlib import Path


def peak_bytes() -> int:
    """Give the most resident memory that this process had so far, mapped files included."""
    return _kilobytes(Path("/proc/self/status"), "VmHWM:") * 1024


def available_bytes() -> int:
    """Give the memory that can be had without swapping."""
    return _kilobytes(Path("/proc/meminfo"), "MemAvailable:") * 1024


def _kilobytes(table: Path, name: str) -> int:
    for line in table.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    return 0
