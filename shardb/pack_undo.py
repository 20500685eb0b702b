"""Unpacking: packed objects stored whole again.

Owns the order, for one object after the other: unpacked and verified, written to a staged file,
synced; renamed to its name and the directory synced; an `unpack` record, which is the point from
which the image is the object's file; the packed file removed. What was a difference against the
object still is one: its bytes are the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from shardb.errors import ObjectMissingError, ShardbError
from shardb.objects import StagedObject, chunks_of
from shardb.pack_choice import may_unpack, pinned
from shardb.pack_report import OnProgress, Unpacked, with_progress
from shardb.pack_turn import PACK_KEY, packing_alone, sync_objects_directory
from shardb.records import Commit, new_record
from shardb.references import PackRow, held_packs
from shardb.state import Tables
from shardb.store import Store


def unpack_snapshots(
    store: Store, snapshots: Sequence[str] = (), *, on_progress: OnProgress | None = None
) -> Unpacked:
    """Store the packed objects of snapshots whole again, by default all there are.

    What was unpacked before an error or an interrupt stays so. Raises what packing raises.
    """
    started = time.monotonic()
    with packing_alone(store):
        rows = store.index.read(lambda tables: _packed_of(tables, snapshots))
        result = Unpacked()
        pending = [((digest, row), row.bytes) for digest, row in rows.items()]
        for digest, row in with_progress(pending, on_progress):
            if _unpack(store, digest, row):
                result.objects += 1
                result.bytes += row.bytes
                result.packed_bytes += row.packed_bytes
        result.seconds = time.monotonic() - started
        return result


def _packed_of(tables: Tables, snapshots: Sequence[str]) -> dict[str, PackRow]:
    """The packed objects of the commits that are named; all of them where none is.

    Those that pinned commits need: others may be gone, though an index made anew tells of them.
    """
    rows = {digest: PackRow.from_row(row) for digest, row in held_packs(tables).items()}
    if not snapshots:
        return rows
    commits = (Commit.from_record(tables.get("commits", c)) for c in pinned(tables, snapshots))
    wanted = {entry.digest for commit in commits for entry in commit.shards.values()}
    return {digest: row for digest, row in rows.items() if digest in wanted}


def _unpack(store: Store, digest: str, row: PackRow) -> bool:
    """Unpack one object; False when it was retired meanwhile."""
    try:
        _, image = store.objects.open(digest, row.bytes)
    except ObjectMissingError:
        if store.index.read(lambda tables: may_unpack(tables, digest)):
            raise
        return False
    with store.appender.errors("unpacking", row.bytes):
        staged = store.objects.write_chunks(chunks_of(image.data), row.bytes, PACK_KEY)
    assert staged.digest == digest, "what was read had the right digest"
    try:
        return _publish(store, staged)
    except BaseException:
        store.drop_object(staged)
        raise


def _publish(store: Store, staged: StagedObject) -> bool:
    """Make a staged image the object's file; False when nothing needs it any more."""
    digest = staged.digest
    store.sync_objects([staged])
    with store.appender.exclusive("unpacking") as end:
        if not store.index.read(lambda tables: may_unpack(tables, digest)):
            store.objects.drop(staged)
            return False
        store.objects.place(staged)
        sync_objects_directory(store)
        try:
            store.appender.append(end, new_record("unpack", digest=bytes.fromhex(digest)))
        except ShardbError as error:
            if error.definite:
                store.files.unlink(store.objects.path(digest))
            raise
        store.objects.retire_packed(digest)
    return True
