"""What the operating system knows of a path beside stat(2), and nobody asks every day.

Owns the asking, by ioctl(2) and by a rename that cannot happen. Changes nothing, and knows nothing
of the store.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from contextlib import suppress

# ioctl_iflags(2): asks for a word of flags, of which these are "append only" and "immutable".
FS_IOC_GETFLAGS = 0x80086601
UNCHANGEABLE = 0x20 | 0x10


def is_immutable(path: str) -> bool:
    """Whether chattr(1) has forbidden to change a file or directory, or but to append to it."""
    with suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            told = fcntl.ioctl(file, FS_IOC_GETFLAGS, bytes(8))
        finally:
            os.close(file)
        return int.from_bytes(told[:4], sys.byteorder) & UNCHANGEABLE != 0
    return False


def can_rename(source: str, target: str) -> bool:
    """Whether a file of one directory can be renamed into another: both are of one mount.

    The system compares the mounts before it looks for the file, and there is none of this name. Of
    what it lets through, parts of one mount that keep files of their own have other devices.
    """
    name = f"no-such-file.{os.urandom(8).hex()}"
    try:
        os.rename(f"{source}/{name}", f"{target}/{name}")
    except OSError as error:
        if error.errno == errno.EXDEV:
            return False
    with suppress(OSError):
        return os.stat(source).st_dev == os.stat(target).st_dev
    return True
