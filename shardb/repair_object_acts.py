"""Mending objects as it was decided, in an open store; and saying in its log what is given up.

Owns putting objects back and the order of giving up: branches go back first, then names go, and one
record (`repair`) ends it. Interrupted anywhere, the store is whole but for what was damaged before,
and the next repair finds the rest. What is damaged is kept aside, never written over again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardb import branching
from shardb.errors import LogDamagedError, ObjectCorruptError
from shardb.fsck_leftovers import SET_ASIDE_PREFIX
from shardb.fsck_log import check_log
from shardb.fsck_view import take_view
from shardb.history import FaultKey
from shardb.index_state import read_index
from shardb.objects import StagedObject
from shardb.obstacles import obstacle_at
from shardb.pack_turn import sync_objects_directory
from shardb.records import Commit, Record, ShardEntry, new_record
from shardb.references import pack_row
from shardb.repair_objects import ObjectPlan
from shardb.repair_sources import RepairSource
from shardb.state import Tables
from shardb.store import Store

# The branch, impossible as a name, under which restored objects are staged.
REPAIR_KEY = "@repair"


def mend_objects(store: Store, told: ObjectPlan) -> None:
    """Put back what can be had, give up the rest. Raises BranchLockedError beside a writer."""
    with store.receiving(REPAIR_KEY):
        store.objects.reclaim_staged(REPAIR_KEY)
        for staged in _all_staged(store, told):
            _put_back(store, staged)
        for branch, target in told.rewinds.items():
            branching.rewind(store, branch, target.id)
        _set_aside(store, told)
        for name in told.snapshots:
            branching.delete_snapshot(store, name)
        _record(store, told)


# Putting back


def _all_staged(store: Store, told: ObjectPlan) -> list[StagedObject]:
    """Copies of all of them, before the first is put in its place: names may be exchanged."""
    staged: list[StagedObject] = []
    try:
        for entry, source in told.restores.values():
            staged.append(_staged(store, entry, source))
    except BaseException:
        for copy in staged:
            store.drop_object(copy)
        raise
    return staged


def _staged(store: Store, entry: ShardEntry, source: RepairSource) -> StagedObject:
    """A copy of an object from elsewhere, verified and synced."""
    with store.appender.errors(f"restoring {entry.digest}", entry.bytes):
        staged = store.objects.write_chunks(source.chunks(entry), entry.bytes, REPAIR_KEY)
    if staged.digest != entry.digest:
        store.drop_object(staged)
        raise ObjectCorruptError(
            f"{source.name}: the bytes of object {entry.digest} have changed while they were read; "
            "run the same command again",
            path=source.name,
        )
    store.sync_objects([staged])
    return staged


def _put_back(store: Store, staged: StagedObject) -> None:
    digest = staged.digest
    with store.appender.exclusive("restoring an object") as end:
        if store.index.read(lambda tables: tables.get("objects", digest)) is None:
            store.drop_object(staged)  # its commits went meanwhile
            return
        is_packed = store.index.read(lambda tables: pack_row(tables, digest)) is not None
        _place(store, staged)
        if is_packed:
            # From here on its image is the object's file.
            store.appender.append(end, new_record("unpack", digest=bytes.fromhex(digest)))
            store.objects.retire_packed(digest)


def _place(store: Store, staged: StagedObject) -> None:
    path = store.objects.path(staged.digest)
    if obstacle_at(store.files, path) is not None:
        store.files.rename(path, _aside(store, path))
    store.objects.place(staged)
    sync_objects_directory(store)


def _aside(store: Store, path: str) -> str:
    return f"{store.objects.directory}/{SET_ASIDE_PREFIX}{path.rpartition('/')[2]}"


# Giving up


def _set_aside(store: Store, told: ObjectPlan) -> None:
    """Damaged files that no commit needs once this is done: not to be used again, nor forgotten."""
    with store.appender.exclusive("keeping damaged objects aside"):
        still = store.index.read(lambda tables: _still_needed(tables, told))
        for digest in told.lost:
            paths = (store.objects.path(digest), store.objects.packed_path(digest))
            for path in paths if digest not in still else ():
                if store.files.exists(path):
                    store.files.rename(path, _aside(store, path))


def _still_needed(tables: Tables, told: ObjectPlan) -> set[str]:
    """Objects of the commits that some name will keep."""
    kept = {
        commit
        for name, row in tables.items("branches")
        for commit in row["retained"]
        if commit not in told.dropped or commit == row["head"]
    }
    kept |= {row["commit"] for name, row in tables.items("snapshots") if name not in told.snapshots}
    commits = (Commit.from_record(tables.get("commits", commit)) for commit in kept)
    return {entry.digest for commit in commits for entry in commit.shards.values()}


def _record(store: Store, told: ObjectPlan) -> None:
    """One record for commits without a name, and for what is lost of the history."""
    faults, closed = _history(store)

    def make(tables: Tables) -> Record | None:
        heads = {row["head"] for _, row in tables.items("branches")}
        dropped = [
            commit
            for commit in told.dropped
            if commit not in heads and tables.get("commits", commit) is not None
        ]
        changed = closed != (tables.get("meta", "closed") or [])
        if not dropped and not faults and not changed:
            return None
        return new_record(
            "repair",
            dropped=dropped,
            acknowledged=[list(fault) for fault in faults],
            closed=closed if changed else None,
        )

    store.appender.change(make)


def _history(store: Store) -> tuple[list[FaultKey], list[Any]]:
    """What is damaged in the log, and the closed segments as they are now."""
    view = take_view(store.files, store.root)
    assert view.index is not None
    checked = check_log(store.files, view, read_index(view.index))
    closed = store.index.read(lambda tables: tables.get("meta", "closed")) or []
    return [key for key, _ in checked.faults], list(_as_they_are(store, closed))


def _as_they_are(store: Store, closed: list[Any]) -> Iterator[Any]:
    """The list of closed segments without those that are gone, and those changed as they are."""
    for entry in closed:
        try:
            if store.files.exists(store.log.compressed_path(entry[0])):
                found = store.log.describe(entry[0])
                yield entry if [found[1], found[2]] == [entry[1], bytes(entry[2])] else found
        except (OSError, LogDamagedError):
            continue
