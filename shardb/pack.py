"""Packing: cold objects of snapshots stored compressed, and back.

Owns the order, for one object after the other:
1. packed into a staged file, synced; unpacked again from there, and its digest compared
2. under the log's lock: still needed? renamed to `objects/<digest>.pack`, the directory synced
3. a `pack` record appended, synced: the point from which the packed file is the object's
4. the image, which had the object's name until now, set aside; then removed without the lock
Before 3 the object is its image, after it the packed file; a crash leaves one of them more than is
needed, never one less. Images are removed, not recycled: a name that a crash brings back shows what
it always showed. `unpack` goes the same way in the other direction.

At most one process packs a store. Reader and writers go on meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import xxhash

from shardb.errors import NotFoundError, ObjectCorruptError, ShardbError
from shardb.pack_choice import Candidate, Chains, Version, choose, may_pack
from shardb.pack_codec import Compressors, plan
from shardb.pack_report import OnProgress, Packed, PackedObject, with_progress
from shardb.pack_turn import PACK_KEY, packing_alone, sync_objects_directory
from shardb.pack_writing import Base, StagedPack, write_packed
from shardb.records import new_record
from shardb.store import Store
from shardb.views import ShardView

# A file that is not shorter by this much stays as it is.
WORTH_PACKING = 0.95
GAINS_LITTLE = "gains too little"
CHAIN_FULL = "others are differences against it"
GONE = "retired meanwhile"


def pack_snapshots(
    store: Store,
    snapshots: Sequence[str] = (),
    *,
    level: int = 1,
    on_progress: OnProgress | None = None,
) -> Packed:
    """Pack the cold objects of snapshots, by default of all; `level` is zstd's.

    What was packed before an error or an interrupt stays packed. Raises NotFoundError and
    UsageError for refs, ConflictError beside another packing, StorageFullError when there is no
    space for the next packed file (nothing else is changed), CorruptionError for a damaged object.
    """
    compressors = Compressors(level)
    with packing_alone(store):
        chosen = store.index.read(lambda tables: choose(tables, snapshots))
        started, packing = time.monotonic(), _Packing(store, compressors)
        packing.result.skipped.update(chosen.skipped)
        pending = [(c, c.version.entry.bytes) for c in chosen.candidates]
        for candidate in with_progress(pending, on_progress):
            packing.pack(candidate)
        packing.result.seconds = time.monotonic() - started
        return packing.result


class _Packing:
    """One packing of many objects."""

    def __init__(self, store: Store, compressors: Compressors) -> None:
        self.result = Packed()
        self._store = store
        self._compressors = compressors
        self._chains = store.index.read(Chains)
        self._last: ShardView | None = None  # often the base of the next one

    def pack(self, candidate: Candidate) -> None:
        """Pack one object, or count why not."""
        try:
            with ExitStack() as leases:
                reason = self._pack_leased(candidate, leases)
        except NotFoundError:
            reason = GONE  # its snapshot was removed
        if reason is not None:
            self.result.skipped[reason] += 1

    def _pack_leased(self, candidate: Candidate, leases: ExitStack) -> str | None:
        """Pack an object whose bytes, and whose base's, nobody recycles; give why not."""
        store, version = self._store, candidate.version
        view = self._read(version, leases)
        base = self._base(candidate, leases)
        if base is None and not self._allows(version.digest, None):
            return CHAIN_FULL
        base_image = base.image if base is not None else None
        chosen = plan(view.layout, view.image, base_image, self._compressors)
        self._last = view
        if chosen.estimated_bytes > WORTH_PACKING * view.bytes:
            return GAINS_LITTLE
        base = base if chosen.needs_base else None
        path = store.objects.staged_name(PACK_KEY)
        with store.appender.errors(f"packing {version.shard!r}", chosen.estimated_bytes):
            staged = write_packed(
                store, path, version.digest, view.image, chosen, base, self._compressors
            )
        return self._publish(version, base, staged)

    def _read(self, version: Version, leases: ExitStack) -> ShardView:
        """An object that is leased from here on; ObjectCorruptError unless its bytes are right."""
        leases.enter_context(self._store.at(commit=version.commit.id))
        view = self._last
        if view is None or view.digest != version.digest:
            view = self._store.read_object(version.shard, version.entry)
        if xxhash.xxh3_128_hexdigest(view.image.data) != version.digest:
            raise ObjectCorruptError(
                f"{self._store.objects.path(version.digest)}: damaged, so it is not packed; run "
                "`shardb fsck` to see which steps it hits",
                path=self._store.objects.path(version.digest),
            )
        return view

    def _base(self, candidate: Candidate, leases: ExitStack) -> Base | None:
        version = candidate.neighbour
        if version is None or not self._allows(candidate.version.digest, version.digest):
            return None
        try:
            view = self._read(version, leases)
        except NotFoundError:
            return None  # its snapshot was removed
        return Base(digest=version.digest, step=version.commit.step, image=view.image)

    def _allows(self, digest: str, base: str | None) -> bool:
        allows = self._chains.allows
        return self._store.index.read(lambda tables: allows(tables, digest, base))

    def _publish(self, version: Version, base: Base | None, staged: StagedPack) -> str | None:
        """Steps 2 to 4; the packed file goes when it may not be published."""
        store, digest = self._store, version.digest
        base_digest = base.digest if base is not None else None
        place = store.objects.packed_path(digest)
        record = new_record(
            "pack",
            digest=bytes.fromhex(digest),
            base=None if base_digest is None else bytes.fromhex(base_digest),
            bytes=version.entry.bytes,
            packed_bytes=staged.bytes,
            file_digest=bytes.fromhex(staged.file_digest),
        )
        with store.appender.exclusive("packing") as end:
            if not store.index.read(lambda tables: may_pack(tables, digest, base_digest)):
                store.files.unlink(staged.path)
                return GONE
            store.files.rename(staged.path, place)
            sync_objects_directory(store)
            try:
                store.appender.append(end, record)
            except ShardbError as error:
                if error.definite:
                    store.files.unlink(place)
                raise
            aside = _set_image_aside(store, digest)
        if aside is not None:
            store.files.unlink(aside)
        self._chains.add(digest, base_digest)
        self._tell(version, base, staged)
        return None

    def _tell(self, version: Version, base: Base | None, staged: StagedPack) -> None:
        self.result.objects.append(
            PackedObject(
                shard=version.shard,
                step=version.commit.step,
                digest=version.digest,
                bytes=version.entry.bytes,
                packed_bytes=staged.bytes,
                base=base.digest if base is not None else None,
                base_step=base.step if base is not None else None,
            )
        )


def _set_image_aside(store: Store, digest: str) -> str | None:
    """Take the image of a packed object out of `objects/`; the log's lock is held.

    Where images in memory are those files, ours goes with it.
    """
    with suppress(FileNotFoundError):
        aside = store.objects.unplace(digest, PACK_KEY)
        if store.mapped and (buffer := store.cache.pop(digest)) is not None:
            buffer.disown()
            buffer.release(store.buffers)
        return aside
    return None
