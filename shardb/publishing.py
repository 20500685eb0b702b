"""Steps 2 to 6 of a commit: from synced files under staged names to the commit point.

Called with everything staged, written and synced; see `shardb.transaction` for the whole order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from shardb import references
from shardb.errors import ConflictError, StorageFullError
from shardb.objects import StagedObject
from shardb.records import Commit
from shardb.references import Retired
from shardb.state import Tables

if TYPE_CHECKING:
    from shardb.store import Store


def publish_commit(store: Store, commit: Commit, objects: Mapping[str, StagedObject]) -> None:
    """Name the objects, append the commit record, apply it, retire what it lets go."""
    with store.appender.exclusive("committing") as end:
        _check_parent(store, commit)
        placed = place_objects(store, commit, objects.values())
        try:
            store.appender.append(end, commit.to_record(), commit_id=commit.id)
        except StorageFullError:
            # Certainly not committed: a full disk needs the space of what was placed for nothing.
            store.objects.retire(placed)
            raise


def _check_parent(store: Store, commit: Commit) -> None:
    head = store.branches().get(commit.branch)
    if (head.id if head else None) != commit.parent:
        raise ConflictError(
            f"branch {commit.branch!r} has moved to {head.id if head else 'nothing'} since this "
            "transaction began; begin again"
        )


def _stored(tables: Tables, wanted: set[str]) -> set[str]:
    """Which objects the store has, once it is swept.

    A packed one counts only while a pinned commit needs it: the record will say that it is whole.
    """
    lost = references.lost(tables, wanted)
    return {d for d in wanted if tables.get("objects", d) is not None and d not in lost}


def place_objects(store: Store, commit: Commit, objects: Iterable[StagedObject]) -> list[Retired]:
    """Name the staged files by content; what the store has already is not stored twice.

    The log's lock is held, and every object of the commit is staged or held by the store.

    Only the index says what the store has, once it is swept: a file of the right name that no
    commit references is a leftover of unknown content, and is replaced. Returns what was placed.
    """
    store.appender.sweep()
    wanted = {entry.digest for entry in commit.shards.values()}
    known = store.index.read(lambda tables: _stored(tables, wanted))
    objects = list(objects)
    placed = set(known)
    for staged in objects:
        if staged.digest in placed:
            store.objects.drop(staged)
        else:
            store.objects.place(staged)
            placed.add(staged.digest)
    assert wanted <= placed, f"objects {wanted - placed} are neither staged nor live"
    if placed != known:
        try:
            store.objects.sync_directory()
        except OSError as error:
            raise store.appender.fail(store.appender.error("syncing objects/", error)) from error
    return [Retired(digest=s.digest, bytes=s.bytes) for s in objects if s.digest not in known]
