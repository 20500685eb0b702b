"""Space kept for the moment when there is none left.

Owns the file `reserve` in a store: allocated when the store is made, so that a full disk still has
room to bring the index up to the log. It is given up when that is needed and allocated again when
there is room. Its content means nothing. Knows nothing of what needs the space.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TypeVar

from shardb.errors import StorageFullError
from shardb.filesystem import CREATE, WRITE, FileSystem, opened, write_all

RESERVE_BYTES = 1 << 20
RESERVE_STEP_BYTES = 64 << 10
_FULL = (errno.ENOSPC, errno.EDQUOT)
T = TypeVar("T")


def reserve_path(root: str) -> str:
    """Where the reserve of a store lies."""
    return f"{root}/reserve"


def ensure(files: FileSystem, root: str) -> bool:
    """Allocate the reserve, or as much of it as there is room for; False when there is none."""
    path = reserve_path(root)
    if files.exists(path) and files.status(path).size_bytes >= RESERVE_BYTES:
        return True
    for size_bytes in range(RESERVE_BYTES, 0, -RESERVE_STEP_BYTES):
        try:
            with opened(files, path, WRITE | CREATE) as file:
                _allocate(files, file, size_bytes)
            return True
        except OSError as error:
            if error.errno not in _FULL:
                raise
    release(files, root)
    return False


def release(files: FileSystem, root: str) -> bool:
    """Give the reserve up; False when there is none."""
    try:
        files.unlink(reserve_path(root))
    except FileNotFoundError:
        return False
    return True


def with_reserve(files: FileSystem, root: str, act: Callable[[], T]) -> T:
    """Do what may find the disk full; then do it once more with the reserve given up."""
    try:
        return act()
    except StorageFullError:
        if not release(files, root):
            raise
    result = act()
    ensure(files, root)
    return result


def _allocate(files: FileSystem, file: int, size_bytes: int) -> None:
    try:
        files.allocate(file, size_bytes, keep_size=False)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        write_all(files, file, bytes(size_bytes), 0)
