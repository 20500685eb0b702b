"""Files of a store that another directory has too: what `cp -al` and removers of duplicates leave.

Owns which files must be a store's own, because it writes to them in place: the raw segments of the
log and the index. Two directories that share these are one store with two sets of objects: what one
commits, the other one tells of, and a repair of one cuts the history of both. Objects may be
shared: one that is to be written again is let go instead (`shardb.objects`).
"""

from __future__ import annotations

from shardb.errors import ConflictError
from shardb.filesystem import FileSystem, list_if_there, read_file, write_file_durably
from shardb.index import MAP_BYTES

INDEX, INDEX_LOCK = "index/data.mdb", "index/lock.mdb"


def shared_files(files: FileSystem, root: str) -> list[str]:
    """Name the files below a store that must be its own and have another name elsewhere."""
    segments = [f"wal/{name}" for name in list_if_there(files, f"{root}/wal")]
    places = [*(name for name in segments if name.endswith(".wal")), INDEX, INDEX_LOCK]
    return [name for name in places if _has_other_name(files, f"{root}/{name}")]


def _has_other_name(files: FileSystem, path: str) -> bool:
    try:
        status = files.status(path)
    except OSError:
        return False  # missing, or in nobody's reach: whoever reads it says so
    return status.links > 1 and not status.is_directory


def make_own(files: FileSystem, root: str, *, alone: bool) -> list[str]:
    """Give a store files of its own in the place of shared ones; return their names.

    The caller holds the log's lock. Raises ConflictError unless it is alone in the store: somebody
    who has a file open goes on with the shared one.
    """
    shared = shared_files(files, root)
    if shared and not alone:
        raise ConflictError(
            f"{root}/{shared[0]}: another directory has this file too: one of them is a hard-linked"
            " copy of the other (`cp -al`), and a process has the store open. Remove the other"
            " directory, or wait until that process ends: whoever opens the store next then gives"
            " it files of its own. Until then whatever opens one of them is refused, also a clone",
            path=f"{root}/{shared[0]}",
        )
    for name in shared:
        path = f"{root}/{name}"
        if name == INDEX_LOCK:
            files.unlink(path)  # nobody has the index open: LMDB makes it anew
        else:
            write_file_durably(files, path, read_file(files, path, limit_bytes=MAP_BYTES))
    return shared
