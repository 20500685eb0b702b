"""Putting a damaged log together with what another copy of it has.

Owns which segments are looked for, and when one is whole again. Every record holds the digest of
the one before it, so bytes of another history do not fit: a copy is not believed, it is tried.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardb import records
from shardb.errors import LogDamagedError
from shardb.filesystem import FileSystem
from shardb.fsck_log import Replay
from shardb.fsck_view import View
from shardb.index_state import IndexState
from shardb.log import Log
from shardb.repair_sources import StoreFiles
from shardb.repair_state import (
    START_OF_LOG,
    Chain,
    all_frames,
    has_effect,
    last_chain,
    merged,
    only_in,
)


class FilledLog(Log):
    """The log of a view, as it will be when some of its segments are put back.

    A writer may go on meanwhile: what comes behind the view is not seen.
    """

    def __init__(self, files: FileSystem, view: View) -> None:
        super().__init__(files, f"{view.root}/wal")
        self._seen = list(view.sequences)
        self._last = view.last
        self.fills: dict[int, bytes] = {}

    def sequences(self) -> list[int]:
        return sorted({*self._seen, *self.fills})

    def stored_path(self, sequence: int) -> str:
        return self.path(sequence) if sequence in self.fills else super().stored_path(sequence)

    def is_closed(self, sequence: int) -> bool:
        if sequence in self.fills or not super().is_closed(sequence):
            return False
        was_last = self._seen[-1:] == [sequence]
        return not (was_last and super().sequences()[-1] > sequence)  # closed since

    def size_bytes(self, sequence: int) -> int:
        return len(self.read(sequence))

    def read(self, sequence: int, start: int = 0) -> bytes:
        filled = self.fills.get(sequence)
        if filled is None and self._seen[-1:] == [sequence] and self._last is not None:
            filled = self._last
        if filled is not None:
            return filled[start:]
        try:
            return super().read(sequence, start)
        except FileNotFoundError:
            return super().read(sequence, start)  # closed and compressed at this moment

    def content(self, sequence: int) -> bytes | None:
        """The frames of a segment; None where it cannot be read."""
        try:
            return self.read(sequence)
        except (OSError, LogDamagedError):
            return None


def filled_from(
    log: FilledLog,
    copy: StoreFiles,
    sequences: Sequence[int],
    index: IndexState | None,
    checked: Replay,
    *,
    store_id: str | None,
    ahead: bool,
) -> dict[int, bytes]:
    """The segments that are whole with what a copy has; `checked` says what is wrong with ours.

    `store_id` is ours, if it is known: where nothing is left of ours to compare with, it decides.
    With `ahead` the copy may go on where ours ends: ours may have lost its end without a trace.
    """
    return _Filling(log, copy, sequences, index, checked, store_id, ahead).run()


def is_idle(log: FilledLog, sequences: Sequence[int], lsn: int) -> bool:
    """Whether a record lies behind all that changed something; it may give way to others."""
    data = log.content(max(sequences)) if sequences else None
    end = _effective_end(data) if data is not None else 0
    return any(frame.lsn == lsn and frame.offset >= end for frame in all_frames(data))


class _Filling:
    """Damaged and missing segments, put together from two copies."""

    def __init__(
        self,
        log: FilledLog,
        copy: StoreFiles,
        sequences: Sequence[int],
        index: IndexState | None,
        checked: Replay,
        store_id: str | None,
        ahead: bool,
    ) -> None:
        self.log = log
        self.copy = copy
        self.sequences = sequences
        self.ahead = ahead
        self.applied = index.applied if index is not None and index.applied.lsn else None
        self.keys = [key for key, _ in checked.faults]
        self.store_id = store_id
        self.fills: dict[int, bytes] = {}

    def run(self) -> dict[int, bytes]:
        """The segments that are whole with what the copy has."""
        for sequence in sorted(self._wanted()):
            before, theirs = self._before(sequence), self.copy.segment(sequence)
            if before is None or theirs is None:
                continue
            ours = self._ours(sequence)
            found = merged(ours, theirs, before)
            if found != ours and self._is_whole(sequence, found, ours):
                self.fills[sequence] = found
            elif self._is_the_right_one(sequence, theirs, before):
                self.fills[sequence] = theirs
        return self.fills

    def _ours(self, sequence: int) -> bytes | None:
        data = self.log.content(sequence) if sequence in self.sequences else None
        if self.ahead and data is not None and sequence == max(self.sequences):
            return data[: _effective_end(data)]
        return data

    def _wanted(self) -> set[int]:
        """Segments with a fault, before one that does not follow, and from the last one on."""
        wanted = {sequence for sequence, _, _ in self.keys}
        wanted |= {s - 1 for s, kind, offset in self.keys if (kind, offset) == ("chain", 0)}
        last = max([1, *self.sequences])
        wanted.add(last)
        if self.applied is not None and not self.ahead:
            wanted |= set(range(last, self.applied.sequence + 1))
        else:
            wanted |= {s for s in self.copy.sequences() if s >= last}
        return wanted - {0}

    def _before(self, sequence: int) -> Chain | None:
        if sequence == 1:
            return START_OF_LOG
        return last_chain(self.fills.get(sequence - 1) or self._ours(sequence - 1))

    def _is_whole(self, sequence: int, found: bytes, ours: bytes | None) -> bool:
        """Whether nothing is missing: what comes behind follows, or nobody saw more of it."""
        chain = last_chain(found)
        ours_frames = all_frames(ours)
        if chain is None or only_in(ours, found):
            return False
        is_ours = self._follows(chain, self._ours(sequence + 1))
        is_theirs = self._follows(chain, self.copy.segment(sequence + 1))
        is_seen = self._is_seen(sequence, found)
        if False in (is_ours, is_seen) or (is_ours is None and is_theirs is False):
            return False
        return bool(ours_frames) or is_ours or is_seen or self._is_of_this_store(sequence, found)

    def _is_the_right_one(self, sequence: int, theirs: bytes, before: Chain) -> bool:
        """Whether ours is an older file that went another way, and the index saw the copy's.

        So it is where both begin as one and the copy's leads, record by record, to the one that
        the index applied last, to which ours does not come.
        """
        applied = self.applied
        last = max(self.sequences, default=0)
        if applied is None or sequence != last or sequence > applied.sequence:
            return False
        ours = self._ours(sequence)
        there = all_frames(ours)
        begins_as_one = sequence > 1 or len(only_in(ours, theirs)) < len(there)
        if not begins_as_one or any(frame.lsn >= applied.lsn for frame in there):
            return False
        chain: Chain | None = before
        for place in range(sequence, applied.sequence + 1):
            data = self.copy.segment(place)
            if chain is None or not self._follows(chain, data):
                return False
            chain = last_chain(data)
        assert data is not None, "it follows"
        return chain is not None and bool(self._is_seen(applied.sequence, data))

    def _follows(self, chain: Chain, data: bytes | None) -> bool | None:
        """Whether a segment goes on from a chain; None where that cannot be told."""
        first = all_frames(data)[:1]
        if not first or first[0].offset:
            return None
        return (first[0].lsn - 1, first[0].previous) == chain

    def _is_seen(self, sequence: int, found: bytes) -> bool | None:
        """Whether the record that the index applied last is there; None where it need not be."""
        applied = self.applied
        if applied is None or applied.sequence != sequence:
            return None
        return any((f.lsn, f.digest) == (applied.lsn, applied.digest) for f in all_frames(found))

    def _is_of_this_store(self, sequence: int, found: bytes) -> bool:
        """Nothing of ours is left to compare with, so it must at least tell of this store."""
        if sequence - 1 in self.fills or sequence - 1 in self.sequences:
            return True  # it follows on one that was accepted
        first = all_frames(found)[:1]
        told = records.store_told_by(first[0].payload) if first else None
        return told is not None and told == self.store_id


def _effective_end(data: bytes) -> int:
    """Where the last record that changes something ends; all of it where not all are whole."""
    if last_chain(data) is None:
        return len(data)
    ends = [frame.end for frame in all_frames(data) if has_effect(frame)]
    return max(ends, default=len(data))
