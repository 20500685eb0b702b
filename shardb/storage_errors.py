"""Turning what the operating system says into the store's own errors.

Owns the choice between "full", which changes nothing and can be tried again, and "failed".
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from shlex import quote

from shardb.errors import ShardbError, StorageFailedError, StorageFullError
from shardb.filesystem import FileSystem, leads_nowhere

FULL = (errno.ENOSPC, errno.EDQUOT)
IN_THE_WAY = {
    errno.EISDIR: "a directory lies where the store keeps a file",
    errno.ENOTDIR: "a file lies where the store keeps a directory",
    errno.ENXIO: "a pipe, a socket or a device lies where the store keeps a file",
}
ADVICE = {
    errno.EROFS: (
        "nothing can be changed through this mount. What only reads works (`shardb show`, `ls`, "
        "`fsck`); `shardb clone STORE NEW` makes a copy to go on with"
    ),
    errno.EFBIG: "this process may not write files that long: raise `ulimit -f`",
    errno.EMFILE: "this process may not have more files open: raise `ulimit -n`",
    errno.ENFILE: "the machine has no more open files to give: end what holds many of them",
    errno.EIO: (
        "the disk failed to read or write it, which no command of the store's can mend, and which "
        "says nothing of the bytes. Look at `dmesg`, and at cable and power; copy the disk, or "
        "what of the store can be read (`shardb clone STORE NEW`), to another one, and go on there"
    ),
    errno.EXDEV: (
        "the store's directories must be on one file system, for its files are renamed from one "
        "to another. Put back a directory that was mounted or linked from elsewhere, or go on with "
        "a copy: `shardb clone STORE NEW`"
    ),
}
# With these a file was not even opened for writing, or what was written was cut off again.
NEVER_WRITTEN = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.EFBIG)


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
        return _refusal(files, error)
    if error.errno in ADVICE:
        return f"{error.strerror}: {ADVICE[error.errno]}"
    if there is None and (link := _link_nowhere(files, error)) is not None:
        there = f"{link} is a link that leads nowhere; bring back what it leads to, or"
        return f"{there} move it away, put back what was there, and run `shardb fsck`"
    if there is None:
        return error.strerror or str(error)
    return f"{there}; move it away, put back what was there, and run `shardb fsck`"


def _refusal(files: FileSystem, error: OSError) -> str:
    """Why a file may not be read or changed: its permissions, or an attribute that binds root too.

    To rename or remove a file changes its directory.
    """
    paths = [path for path in (error.filename, error.filename2) if isinstance(path, str)]
    places = [place for path in paths for place in (path, os.path.dirname(path))]
    fixed = next(filter(files.is_immutable, places), None) if error.errno == errno.EPERM else None
    if fixed is not None:
        return (
            f"{error.strerror}: {fixed} was made immutable or append-only, which binds its owner "
            f"and root too (see `lsattr -d`): `chattr -ia {quote(fixed)}`, as root, takes that off"
        )
    return (
        f"{error.strerror}; nothing says that it is damaged: run this as its owner, or chmod or "
        "chown it"
    )


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
