"""Creating a store, and everything that opening one decides.

Owns the order of creation (FORMAT last), the medium check, and bringing index and log together.
Opening never deletes anything, and never starts empty where history exists.
"""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING

from shardb import format as store_format
from shardb import index_state, records, refs, reserve
from shardb.errors import FormatError, LogTruncatedError, UsageError
from shardb.filesystem import FileSystem, read_file
from shardb.hard_links import make_own
from shardb.index import MAP_BYTES, Index
from shardb.listing import listed
from shardb.locks import Locks
from shardb.log import START, Log
from shardb.objects import free_bytes_of
from shardb.obstacles import TRAINER_LOGS
from shardb.records import new_id, new_record
from shardb.recovery import RecoveryReport, catch_up

if TYPE_CHECKING:
    from shardb.store import Store

# Closed log segments are checked at opening up to this many bytes; `fsck` checks all of them.
CLOSED_CHECK_BYTES = 64 << 20


def create(files: FileSystem, root: str) -> bool:
    """Make a store at `root` unless there is one; True when it was made.

    Raises FormatError where there is a log but no FORMAT, UsageError where the place is taken.
    """
    if files.exists(store_format.format_path(root)):
        return False
    log = Log(files, f"{root}/wal")
    if files.exists(f"{root}/wal") and _has_history(log):
        raise FormatError(
            f"{root}: FORMAT is missing, but there is a log with history; put FORMAT back from a "
            "copy, or run `shardb repair`",
            path=root,
        )
    if store_format.has_objects(files, root):
        raise FormatError(f"{store_format.format_path(root)}: {store_format.ORPHANS}", path=root)
    if files.exists(root) and not files.status(root).is_directory:
        raise UsageError(f"{root}: this is a file; choose a directory", path=root)
    if files.exists(root) and files.list(root) and not files.exists(f"{root}/wal"):
        foreign = [
            n for n in files.list(root) if n not in (*store_format.DIRECTORIES, TRAINER_LOGS)
        ]
        if foreign:
            raise UsageError(
                f"{root}: not empty ({listed(foreign, most=3)}) and not a store; choose another "
                "directory",
                path=root,
            )
    store_format.create_directories(files, root)
    locks = Locks(files, root)
    try:
        with locks.wal():
            return _create_alone(files, root, log)
    finally:
        locks.close()


def _create_alone(files: FileSystem, root: str, log: Log) -> bool:
    """Make the log and, last, FORMAT, unless another process was first; the log's lock is held."""
    if files.exists(store_format.format_path(root)):
        return False
    store_id = _begun_store_id(log)
    if store_id is None:
        store_id = new_id()
        record = new_record("init", store_id=store_id, version=store_format.FORMAT_VERSION)
        log.create_segment(START, records.pack(record))
    else:
        log.sync_directory()  # whoever began the segment may have died before that
    reserve.ensure(files, root)
    store_format.write_format(files, root, store_id)
    return True


def _begun_store_id(log: Log) -> str | None:
    """The id in the log that an interrupted creation left; None when it left none."""
    found = log.scan(1).frames if log.sequences() else []
    return str(records.unpack(found[0].payload)["store_id"]) if found else None


def _has_history(log: Log) -> bool:
    sequences = log.sequences()
    if not sequences:
        return False
    return sequences[-1] > 1 or len(log.scan(1).frames) > 1


def check_medium(
    files: FileSystem, root: str, report: RecoveryReport, *, allow_network: bool
) -> None:
    """Refuse network file systems, where locks and syncs cannot be relied on; note memory."""
    kind = files.kind(root)
    if kind.startswith("network:") and not allow_network:
        raise UsageError(
            f"{root} is on a network file system ({kind[8:]}), where locks and syncs cannot be "
            "relied on; use a local disk, or pass --allow-network if only one machine ever opens "
            "it",
            path=root,
        )
    if kind.startswith("memory:"):
        why = f"{kind[7:]} is memory: nothing in it survives power loss"
        report.warnings.append({"what": "volatile medium", "path": root, "why": why})


def open_index(store: Store, report: RecoveryReport) -> Index:
    """Open the index, rebuilding it where it cannot be used, and catch it up with the log."""
    files, locks = store.files, store.locks
    directory = f"{store.root}/index"
    _make_missing_directories(files, store.root, report)
    _check_renaming(files, store.root)
    # FORMAT and the directories are there, but whoever made them may have died before this sync:
    # what is committed from here on must not hang on an entry that power loss takes away.
    files.sync_directory(store.root)
    with locks.wal():
        alone = locks.share_index()
        if not alone:
            locks.settle_index()
        for name in make_own(files, store.root, alone=alone):
            told = "another directory had this file too (a hard-linked copy); now it is its own"
            path = f"{store.root}/{name}"
            report.rebuilt.append({"what": "shared file", "path": path, "why": told})
        if alone and (why := _why_unusable(store, directory)) is not None:
            _set_aside(files, directory, why, report)
        index = Index(files, directory)
        if alone and not _has_history(store.log):
            report.rebuilt.clear()  # a new store never had an index
        try:
            catch_up(store.log, index, report, whole=True)
            _check_store_id(store, index)
        except BaseException:
            index.close()
            raise
        if alone:
            locks.settle_index()
    _describe(store, index, report)
    return index


def _check_renaming(files: FileSystem, root: str) -> None:
    """Raise OSError(EXDEV) where files cannot go from `spare/` to `objects/`, before any work."""
    if not files.can_rename(f"{root}/spare", f"{root}/objects"):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), f"{root}/objects")


def _check_store_id(store: Store, index: Index) -> None:
    logged = index.read(lambda tables: tables.get("meta", "store_id"))
    if logged != store.format.store_id:
        path = store_format.format_path(store.root)
        raise FormatError(
            f"{path}: it names store {store.format.store_id}, but the log beside it is of store "
            f"{logged}; put the right file back, or run `shardb repair`",
            path=path,
        )


def _make_missing_directories(files: FileSystem, root: str, report: RecoveryReport) -> None:
    """Make the directories that are not there: many a tool leaves empty ones out of its copy.

    Raises LogTruncatedError for the log's: what it held is the store.
    """
    missing = [n for n in store_format.DIRECTORIES if not files.exists(f"{root}/{n}")]
    if "wal" in missing:
        raise LogTruncatedError(
            f"{root}/wal: the log is missing; put the directory back from a copy of the store, or "
            "run `shardb repair`, which goes on with what the index knows, if that is whole",
            path=f"{root}/wal",
        )
    for name in missing:
        files.make_directory(f"{root}/{name}")
        if name != "index":  # said in better words when it is filled
            report.rebuilt.append({"what": "directory", "path": f"{root}/{name}", "why": "missing"})


def _why_unusable(store: Store, directory: str) -> str | None:
    """Why the index cannot be used; None when it can. Raises FormatError for another store's.

    LMDB trusts its file: a truncated or scribbled one can end the process. So its pages are walked
    with every bound checked before it is mapped, and its entries compared with the log's records.
    """
    path, files, log = f"{directory}/data.mdb", store.files, store.log
    if not files.exists(path):
        return "missing"
    try:
        index = index_state.read_index(read_file(files, path, limit_bytes=MAP_BYTES))
    except index_state.IndexUnreadableError as error:
        return str(error)
    index_state.check_own(log, index, store.format.store_id, path)
    found = index_state.disagreement(log, index)
    return None if found is None else f"it is not what the log says: {found}"


def _set_aside(files: FileSystem, directory: str, why: str, report: RecoveryReport) -> None:
    path = f"{directory}/data.mdb"
    if why != "missing":
        files.rename(path, f"{directory}/unreadable-{int(time.time())}.mdb")
    report.rebuilt.append({"what": "index", "path": path, "why": why})


def _describe(store: Store, index: Index, report: RecoveryReport) -> None:
    """Fill in what was opened, what dead writers left behind, and damage in the history."""
    closed = index.read(lambda tables: tables.get("meta", "closed")) or []
    for text in store.log.damaged_closed(closed, budget_bytes=CLOSED_CHECK_BYTES):
        path, _, why = text.partition(": ")
        report.warnings.append({"what": "closed log segment", "path": path, "why": why})
    for branch, commit in index.read(refs.branch_heads).items():
        report.opened[branch] = {"commit": commit.id, "step": commit.step}
    for name in store.files.list(f"{store.root}/spare"):
        parts = name.split(".")
        if free_bytes_of(name) is not None or len(parts) != 3 or parts[0] != "staged":
            continue
        branch = parts[1].replace("@", "/")
        if not store.locks.branch_is_locked(branch):
            # What no branch can be called is staged under by copies of snapshots, and by packing.
            ended = "a copy or a packing was interrupted"
            if not branch.startswith("/"):
                ended = f"a transaction on branch {branch!r} ended without a commit"
            path = f"{store.root}/spare/{name}"
            report.dropped.append({"what": "staged object", "path": path, "why": ended})
