"""Turning what the operating system says into the store's own errors.

Owns the choice between "full", which changes nothing and can be tried again, and "failed".
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from shardb.errors import ShardbError, StorageFailedError, StorageFullError
from shardb.filesystem import FileSystem, leads_nowhere

FULL = (errno.ENOSPC, errno.EDQUOT)
IN_THE_WAY = {
    errno.EISDIR: "a directory lies where the store keeps a file",
    errno.ENOTDIR: "a file lies where the store keeps a directory",
    errno.ENXIO: "a pipe, a socket or a device lies where the store keeps a file",
}


@contextmanager
def storage_errors(
    files: FileSystem, path: str, doing: str, needed_bytes: int | None = None
) -> Iterator[None]:
    """Turn what the operating system says into the store's own errors."""
    try:
        yield
    except OSError as error:
        raise storage_error(files, path, doing, error, needed_bytes) from error


def storage_error(
    files: FileSystem, path: str, doing: str, error: OSError, needed_bytes: int | None = None
) -> ShardbError:
    """The store's own error for what the operating system said."""
    where = error.filename or path
    if error.errno in FULL:
        need = f" {needed_bytes} bytes are needed," if needed_bytes else ""
        return StorageFullError(
            f"{where}: no space left while {doing};{need} {_free_text(files, path)}. The previous "
            "commit is intact; free some space (`shardb gc` may help) and go on",
            path=where,
        )
    return StorageFailedError(f"{where}: {doing} failed: {reason(files, error)}", path=where)


def reason(files: FileSystem, error: OSError) -> str:
    """What the operating system said; and what to do about something that is in the way."""
    there = IN_THE_WAY.get(error.errno or 0)
    if isinstance(error, PermissionError):
        return f"{error.strerror}; nothing says that it is damaged: run this as its owner, or chmod"
    if error.errno == errno.EROFS:
        return (
            f"{error.strerror}: nothing can be changed through this mount. What only reads works "
            "(`shardb show`, `ls`, `fsck`); `shardb clone STORE NEW` makes a copy to go on with"
        )
    if error.errno == errno.EFBIG:
        return f"{error.strerror}: this process may not write files that long: raise `ulimit -f`"
    if there is None and (link := _link_nowhere(files, error)) is not None:
        there = f"{link} is a link that leads nowhere; bring back what it leads to, or"
        return f"{there} move it away, put back what was there, and run `shardb fsck`"
    if there is None:
        return error.strerror or str(error)
    return f"{there}; move it away, put back what was there, and run `shardb fsck`"


def _link_nowhere(files: FileSystem, error: OSError) -> str | None:
    """The link because of which a path, or the directory that it is in, is not found."""
    if not isinstance(error.filename, str):
        return None
    with suppress(OSError):
        for path in (error.filename, os.path.dirname(error.filename)):
            if leads_nowhere(files, path):
                return path
    return None


def _free_text(files: FileSystem, path: str) -> str:
    try:
        return f"{files.space(path).free_bytes} bytes are free"
    except OSError:
        return "how much is free is unknown"
