"""The newest state that a damaged log and its index still give.

Owns following the log as far as it is whole, from a checkpoint or from where the index is, and the
choice between the two. Changes nothing. Knows nothing of objects.

A state is believed up to the last record that follows from those before it. The index is a witness:
it saw records that the log has lost since, so that its state may be newer than any that the log
gives; it counts only if its own counts agree and it belongs to this store.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from shardb import frames, records, state
from shardb.errors import LogDamagedError
from shardb.frames import Frame
from shardb.fsck_impact import needed_objects
from shardb.fsck_log import first_kind
from shardb.history import next_frame
from shardb.index_state import IndexState, count_references
from shardb.log import START, Position
from shardb.repair_salvage import has_file, is_whole, salvaged
from shardb.state import DictTables

# The frames of a segment; None where it cannot be read.
Contents = Callable[[int], bytes | None]
Chain = tuple[int, bytes]


@dataclass(frozen=True, kw_only=True)
class End:
    """A state, the position in the log that it reflects, and what gave it.

    `origin` is "log" (every record up to there follows), "index", or "salvage": put together from
    what is whole behind damage.
    """

    tables: DictTables
    position: Position
    origin: str


def chained(data: memoryview, offset: int, before: Chain | None) -> Frame | None:
    """The frame at an offset, if it follows the one before (its number and digest)."""
    frame = frames.decode(data, offset)
    if frame is None or before is None:
        return frame
    return frame if (frame.lsn - 1, frame.previous) == before else None


@dataclass(frozen=True, kw_only=True)
class Ends:
    """What log and index give, each None where it gives nothing.

    `is_other` says that they are of two stores, or that the log has another record where the index
    applied its last: only one of them can be right.
    """

    of_log: End | None
    of_index: End | None
    is_other: bool


def known_ends(sequences: Sequence[int], contents: Contents, index: IndexState | None) -> Ends:
    """The newest states that log and index give."""
    of_log, of_index = _end_of_log(sequences, contents), _end_of_index(contents, index)
    is_other = index is not None and _is_other(contents, index.applied)
    if of_log is not None and of_index is not None:
        ids = {end.tables.get("meta", "store_id") for end in (of_log, of_index)}
        is_other = is_other or len(ids) > 1
    return Ends(of_log=of_log, of_index=of_index, is_other=is_other)


def choose(ends: Ends, store_id: str | None, names: Collection[str]) -> End | None:
    """The state to go on with: the newer one of one history, else the one that fits the store.

    A newer index counts less than a log whose steps still have their files where its own have not.

    `store_id` is what FORMAT says, if that is whole; `names` are the files that objects have.
    """
    of_log, of_index = ends.of_log, ends.of_index
    if of_log is None or of_index is None:
        return of_log or of_index
    if not ends.is_other:
        is_newer = of_log.position.lsn >= of_index.position.lsn
        return of_log if is_newer or _keeps_more(of_log, of_index, names) else of_index
    ids = [end.tables.get("meta", "store_id") for end in (of_log, of_index)]
    if ids[0] != ids[1] and store_id in ids:
        return of_log if ids[0] == store_id else of_index
    if _keeps_more(of_log, of_index, names):
        return of_log
    if _keeps_more(of_index, of_log, names):
        return of_index
    missing = [_missing(end.tables, names) for end in (of_log, of_index)]
    return of_log if missing[0] <= missing[1] else of_index


def _keeps_more(one: End, other: End, names: Collection[str]) -> bool:
    """Whether a state leads to more steps that have files than another one, and to none fewer.

    So it is where log and objects were put back from a backup and the index was not: the index
    knows newer steps, of which nothing is there.
    """
    ours, theirs = _whole_steps(one.tables, names), _whole_steps(other.tables, names)
    return ours != theirs and all(ours.get(name, -1) >= step for name, step in theirs.items())


def _whole_steps(tables: DictTables, names: Collection[str]) -> dict[tuple[str, str], int]:
    """The newest step with all files, of each branch and snapshot that has one."""
    found: dict[tuple[str, str], int] = {}
    rows = [
        *(("branch", name, row["retained"]) for name, row in tables.items("branches")),
        *(("snapshot", name, [row["commit"]]) for name, row in tables.items("snapshots")),
    ]
    for kind, name, commits in rows:
        told = [tables.get("commits", commit) for commit in commits]
        whole = [record["step"] for record in told if is_whole(record, names)]
        if whole:
            found[kind, name] = max(whole)
    return found


def _missing(tables: DictTables, names: Collection[str]) -> int:
    """How many objects of a state have no file."""
    return sum(not has_file(digest, names) for digest in needed_objects(tables))


def salvage(
    end: End | None,
    store_id: str | None,
    sequences: Sequence[int],
    contents: Contents,
    names: Collection[str],
) -> End | None:
    """Take a state on by the whole records behind the damage that it ends at.

    None where there are none, or where not even the store's id is known.
    """
    if end is None:
        begin = DictTables()
        if store_id is not None:
            begin.put("meta", "store_id", store_id)
        end = End(tables=begin, position=START, origin="log")
    behind = records_behind(sequences, contents, end.position)
    if not any(has_effect(frame) for frame in behind):
        return None
    tables = salvaged(end.tables, behind, names)
    if tables.get("meta", "store_id") is None or not tables.tables["branches"]:
        return None
    last = max(behind, key=lambda frame: frame.lsn)
    position = Position(sequence=max(sequences), offset=last.end, lsn=last.lsn, digest=last.digest)
    return End(tables=tables, position=position, origin="salvage")


def has_effect(frame: Frame) -> bool:
    """Whether a record changes what the store has; one that makes no sense does not."""
    try:
        return records.unpack(frame.payload)["kind"] not in state.WITHOUT_EFFECT
    except LogDamagedError:
        return False


def _is_other(contents: Contents, applied: Position) -> bool:
    there = all_frames(contents(applied.sequence))
    return any(f.lsn == applied.lsn and f.digest != applied.digest for f in there)


def all_frames(data: bytes | None) -> list[Frame]:
    """Every whole record of a segment, past whatever is damaged."""
    view, offset = memoryview(data or b""), 0
    found: list[Frame] = []
    while offset < len(view):
        frame = frames.decode(view, offset) or next_frame(view, offset + 1)
        if frame is None:
            break
        found.append(frame)
        offset = frame.end
    return found


def _end_of_log(sequences: Sequence[int], contents: Contents) -> End | None:
    """From the checkpoint of the last segment that begins with one."""
    for sequence in reversed(sequences):
        data = contents(sequence)
        first = frames.decode(memoryview(data), 0) if data else None
        if data is None or first is None:
            continue
        try:
            if records.unpack(first.payload)["kind"] != first_kind(sequence):
                continue
        except LogDamagedError:
            continue
        before = Position(sequence=sequence, offset=0, lsn=first.lsn - 1, digest=first.previous)
        end = _follow(DictTables(), before, data, origin="log")
        if end.position.lsn >= first.lsn:
            return end
    return None


def _end_of_index(contents: Contents, index: IndexState | None) -> End | None:
    """From the state of the index, if that is sound; and on, where the log has its record."""
    if index is None or not index.applied.lsn or not is_sound(index):
        return None
    tables, applied = DictTables.copy_of(index.tables), index.applied
    tables.delete("meta", "applied")
    data = contents(applied.sequence)
    if data is None or not _has_record(data, applied):
        return End(tables=tables, position=applied, origin="index")
    return _follow(tables, applied, data, origin="index")


def is_sound(index: IndexState) -> bool:
    """Whether the counts of an index agree with its own commits."""
    tables = index.tables.tables
    counted = count_references(tables["commits"], tables["packs"])
    return counted == {digest: list(row) for digest, row in tables["objects"].items()}


def _has_record(data: bytes, applied: Position) -> bool:
    """Whether the record that an index applied last is in the log, where it should be."""
    last = (applied.lsn, applied.digest, applied.offset)
    return any((frame.lsn, frame.digest, frame.end) == last for frame in all_frames(data))


def _follow(tables: DictTables, start: Position, data: bytes, *, origin: str) -> End:
    """Apply the records from a position on, as long as each follows from those before."""
    view, at = memoryview(data), (start.offset, start.lsn, start.digest)
    follow: list[Frame] = []
    while (frame := chained(view, at[0], at[1:])) is not None:
        follow.append(frame)
        at = (frame.end, frame.lsn, frame.digest)
    reached = DictTables.copy_of(tables)
    for count, frame in enumerate(follow):
        try:
            state.apply(reached, records.unpack(frame.payload))
        except (LogDamagedError, AssertionError):
            # What a record half changed is not believed: once more up to the one before it.
            follow, reached = follow[:count], DictTables.copy_of(tables)
            for good in follow:
                state.apply(reached, records.unpack(good.payload))
            break
    position = start
    if follow:
        last = follow[-1]
        position = replace(start, offset=last.end, lsn=last.lsn, digest=last.digest)
    return End(tables=reached, position=position, origin=origin)


def records_behind(sequences: Sequence[int], contents: Contents, end: Position) -> list[Frame]:
    """Whole records of the log that come after a position."""
    found = [f for s in sequences if s >= end.sequence for f in all_frames(contents(s))]
    return [frame for frame in found if frame.lsn > end.lsn]


def merged(ours: bytes | None, theirs: bytes | None, before: Chain) -> bytes:
    """A segment put together from two copies of it, as far as its records follow each other.

    Both are of one history, or nothing fits: each record holds the digest of the one before it.
    Where in a copy a record lies does not count: damage may have moved what is behind it.
    """
    following: dict[Chain, tuple[Chain, bytes]] = {}
    for data in (theirs or b"", ours or b""):  # where both go on, ours counts
        for frame in all_frames(data):
            reached = (frame.lsn, frame.digest)
            following[frame.lsn - 1, frame.previous] = reached, data[frame.offset : frame.end]
    out = bytearray()
    while before in following:
        before, taken = following[before]
        out += taken
    return bytes(out)


def only_in(ours: bytes | None, others: bytes | None) -> list[Frame]:
    """The whole records of a segment that another copy of it has not."""
    there = {(frame.lsn, frame.digest) for frame in all_frames(others)}
    return [frame for frame in all_frames(ours) if (frame.lsn, frame.digest) not in there]


def last_chain(data: bytes | None) -> Chain | None:
    """Number and digest of the last record of a segment that is whole; None of another one."""
    if data is None:
        return None
    view, offset = memoryview(data), 0
    before: Chain | None = None
    while offset < len(view):
        frame = chained(view, offset, before)
        if frame is None:
            return None
        offset, before = frame.end, (frame.lsn, frame.digest)
    return before


START_OF_LOG: Chain = (START.lsn, START.digest)
