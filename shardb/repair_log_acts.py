"""Mending a log as it was decided: putting segments back, cutting, keeping aside, beginning anew.

Owns the order of the writes, so that an interrupted repair leaves a store that can be repaired:
what is damaged is kept aside before it is cut, and a new segment appears whole or not at all.
Nothing that was in the log is deleted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import zstandard

from shardb import format as store_format
from shardb import records, state
from shardb.errors import ConflictError
from shardb.filesystem import FileSystem, write_file_durably
from shardb.fsck_leftovers import SET_ASIDE_PREFIX
from shardb.fsck_view import View
from shardb.hard_links import make_own
from shardb.history import read_newest
from shardb.leases import Leases
from shardb.locks import Locks
from shardb.log import COMPRESSION_LEVEL, Log, Position, TornTail
from shardb.obstacles import obstacle_at
from shardb.records import new_id, new_record
from shardb.repair_log import LogPlan


@contextmanager
def alone(files: FileSystem, root: str) -> Iterator[None]:
    """Keep everybody out of a store for a block; ConflictError when somebody has it open."""
    store_format.create_directories(files, root)
    locks = Locks(files, root)
    try:
        with locks.wal():
            if not locks.share_index():
                raise ConflictError(
                    f"{root}: {_who(locks, Leases(files, root))} has this store open; its log can "
                    "be mended only when nobody has. End that, and run the same command again",
                    path=root,
                )
            make_own(files, root, alone=True)
            yield
    finally:
        locks.close()


def _who(locks: Locks, leases: Leases) -> str:
    owners = [*locks.writers(), *leases.describe_all()]
    named = sorted({f"process {owner['pid']}" for owner in owners if "pid" in owner})
    return " and ".join(named) or "another process"


def check_unchanged(files: FileSystem, view: View) -> None:
    """Raise ConflictError when the log is not any more what a decision was made on."""
    if read_newest(Log(files, f"{view.root}/wal")) != (view.sequences, view.last):
        raise ConflictError(
            f"{view.root}: somebody wrote to the log meanwhile; run the same command again",
            path=view.root,
        )


def mend_log(files: FileSystem, root: str, told: LogPlan) -> None:
    """Do to the log what was decided. The caller is alone in the store."""
    _Mending(files, root, told).run()


class _Mending:
    """One log being mended."""

    def __init__(self, files: FileSystem, root: str, told: LogPlan) -> None:
        self.files = files
        self.root = root
        self.told = told
        self.log = Log(files, f"{root}/wal")

    def run(self) -> None:
        for sequence, data in self.told.fills.items():
            self._fill(sequence, data)
        if self.told.index_aside is not None:
            self._set_index_aside()
        if self.told.begins_anew:
            self._cut()
            self._begin_anew()
            self._set_segments_aside()
        else:
            self._set_segments_aside()
            self._cut()

    def _fill(self, sequence: int, data: bytes) -> None:
        """The last segment is stored raw, others compressed; what is no file there goes aside.

        So does what went another way: a copy of it, so that there is a log at every moment.
        """
        if sequence in self.told.replaced:
            ours = self.log.read(sequence)
            write_file_durably(self.files, self._aside(f"{sequence:010d}-0"), ours)
        for path in (self.log.path(sequence), self.log.compressed_path(sequence)):
            if obstacle_at(self.files, path) is not None:
                self.files.rename(path, self._aside(path.rpartition("/")[2]))
        if sequence == self.told.sequences[-1]:
            write_file_durably(self.files, self.log.path(sequence), data)
            return
        packer = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL, write_checksum=True)
        path = self.log.compressed_path(sequence)
        write_file_durably(self.files, path, packer.compress(data))
        self.log.drop_raw(sequence)

    def _set_index_aside(self) -> None:
        path = f"{self.root}/index/data.mdb"
        self.files.rename(path, f"{self.root}/index/unreadable-{int(time.time())}.mdb")
        self.files.sync_directory(f"{self.root}/index")

    def _cut(self) -> None:
        if self.told.cut_at is None:
            return
        sequence, offset = self.told.end.position.sequence, self.told.cut_at
        behind = self.log.read(sequence, offset)
        write_file_durably(self.files, self._aside(f"{sequence:010d}-{offset}"), behind)
        torn = TornTail(path=self.log.path(sequence), offset=offset, length=len(behind))
        self.log.cut(torn)

    def _aside(self, name: str) -> str:
        return f"{self.log.directory}/{SET_ASIDE_PREFIX}{name}.{new_id()[-8:]}"

    def _begin_anew(self) -> None:
        """A new segment with the state as its checkpoint; what is before it is closed."""
        end = self.told.end
        known = {entry[0]: entry for entry in end.tables.get("meta", "closed") or []}
        kept = [s for s in self.told.sequences if s not in self.told.aside]
        raw = [sequence for sequence in kept if not self.log.is_closed(sequence)]
        for sequence in raw:
            self.log.compress(sequence)
            known[sequence] = self.log.describe(sequence)
        record = new_record("checkpoint", state=state.full_state(end.tables))
        record["state"]["meta"]["closed"] = [known[s] for s in kept if s in known]
        sequence = self.told.next_sequence
        position = Position(
            sequence=sequence - 1, offset=0, lsn=end.position.lsn, digest=end.position.digest
        )
        self.log.create_segment(position, records.pack(record))
        for sequence in raw:
            self.log.drop_raw(sequence)

    def _set_segments_aside(self) -> None:
        for sequence in reversed(self.told.aside):
            for path in (self.log.path(sequence), self.log.compressed_path(sequence)):
                if self.files.exists(path):
                    self.files.rename(path, self._aside(path.rpartition("/")[2]))
        if self.told.aside:
            self.log.sync_directory()
