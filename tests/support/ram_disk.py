"""Directories for simulated disks: on a RAM disk where the machine has one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

RAM_DISK = "/dev/shm"


@contextmanager
def scratch_directory() -> Iterator[str]:
    """Give an empty directory for the length of a block."""
    parent = RAM_DISK if os.access(RAM_DISK, os.W_OK) else None
    path = tempfile.mkdtemp(prefix="shardb-test-", dir=parent)
    try:
        yield path
    finally:
        shutil.rmtree(path)
