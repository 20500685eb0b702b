"""What a check looks at: one consistent sight of a store that somebody may be writing to.

Owns taking the sight: under the log's shared lock nobody appends, applies or retires, so the end of
the log, the index and the directories that are read there belong together. Knows nothing of what is
right or wrong. Invariant: nothing is created or written.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

from shardb.errors import StorageFailedError
from shardb.filesystem import READ, FileSystem, opened, read_file
from shardb.format import DIRECTORIES
from shardb.history import quiet_log, read_newest
from shardb.index import MAP_BYTES
from shardb.log import Log
from shardb.storage_errors import reason


@dataclass(frozen=True, kw_only=True)
class View:
    """A sight of a store: names in its directories, and the bytes of what changes in place.

    `names` has no entry for a directory that is missing. `last` is the last segment's content, None
    where it cannot be read; `index` that of the index, None where there is none.
    """

    root: str
    sequences: list[int]
    last: bytes | None
    index: bytes | None
    names: dict[str, list[str]]

    def leased(self, files: FileSystem) -> set[str]:
        """Commits that a live reader holds."""
        names = self.names.get("leases", [])
        return {n.split(".")[0] for n in names if is_held(files, f"{self.root}/leases/{n}")}


def take_view(files: FileSystem, root: str) -> View:
    """Look at a store; StorageFailedError when the storage refuses to show even its directories."""
    log = Log(files, f"{root}/wal")
    try:
        with quiet_log(files, root):
            listed = {name: _list(files, root, name) for name in DIRECTORIES}
            names = {name: found for name, found in listed.items() if found is not None}
            sequences, last = read_newest(log) if "wal" in names else ([], None)
            return View(
                root=root,
                sequences=sequences,
                last=last,
                index=_index(files, root),
                names=names,
            )
    except OSError as error:
        raise refused(files, root, error) from error


def refused(files: FileSystem, root: str, error: OSError) -> StorageFailedError:
    """The error of storage that does not show what lies in a store: that may be whole."""
    where = error.filename or root
    return StorageFailedError(f"{where}: cannot be read: {reason(files, error)}", path=where)


def _list(files: FileSystem, root: str, name: str) -> list[str] | None:
    try:
        return files.list(f"{root}/{name}")
    except FileNotFoundError:
        return None


def _index(files: FileSystem, root: str) -> bytes | None:
    try:
        return read_file(files, f"{root}/index/data.mdb", limit_bytes=MAP_BYTES)
    except FileNotFoundError:
        return None


def is_held(files: FileSystem, path: str) -> bool:
    """Whether a live process holds the lock of a file; False when there is no such file."""
    try:
        with opened(files, path, READ) as file:
            return not files.lock(file, exclusive=False, blocking=False)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
        return False


def branch_is_written(files: FileSystem, root: str, token: str) -> bool:
    """Whether a live process writes to a branch, given as part of a file name."""
    return is_held(files, f"{root}/locks/branch-{token}")


def any_branch_is_written(files: FileSystem, root: str) -> bool:
    """Whether a live process writes to any branch."""
    names = _list(files, root, "locks") or []
    return any(is_held(files, f"{root}/locks/{n}") for n in names if n.startswith("branch-"))
