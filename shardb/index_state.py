"""Reading the index as bytes, and comparing it with what the log says.

Owns the comparison. The database library is never given the file: a damaged one could end the
process. Knows nothing of where the other tables come from.

Two things in the index are not in the log: condemned commits that a reader held when they were let
go, and the position that was applied. The first are left out of the comparison, the second is the
caller's question. The counts of references must follow from the commits of the index itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgpack

from shardb import index_image, records, state
from shardb.errors import FormatError, ShardbError
from shardb.frames import Frame
from shardb.index import applied_position
from shardb.log import Log, Position
from shardb.records import Commit
from shardb.references import PackRow, held_packs
from shardb.state import META_KEPT, TABLES, DictTables

COMPARED = ("branches", "snapshots", "commits", "pins", "abandoned")
# A longer segment is not replayed at every opening; a check does it whatever the length.
REPLAYED_BYTES_MAX = 16 << 20


class IndexUnreadableError(Exception):
    """The index is no sound database, or holds values that are none of ours."""


@dataclass(frozen=True, kw_only=True)
class IndexState:
    """The tables of an index and the position in the log that they reflect."""

    tables: DictTables
    applied: Position


@dataclass(frozen=True, kw_only=True)
class Difference:
    """An entry of the index that is not what the log says."""

    table: str
    key: str
    expected: str
    found: str


def read_index(data: bytes) -> IndexState:
    """Decode an index; IndexUnreadableError when it is damaged."""
    try:
        databases = index_image.read_image(data)
        tables = DictTables()
        for name in TABLES:
            for key, value in databases.get(name, {}).items():
                tables.put(name, key.decode(), msgpack.unpackb(value, raw=False))
        _check_rows(tables)
        return IndexState(tables=tables, applied=applied_position(tables))
    except index_image.ImageError as error:
        raise IndexUnreadableError(str(error)) from error
    except Exception as error:  # the decoder's own classes differ between versions
        raise IndexUnreadableError(f"an entry does not decode: {error!r}") from error


def _check_rows(tables: DictTables) -> None:
    """Every row has the fields that its readers use, and names commits that are there."""
    commits = tables.tables["commits"]
    for record in commits.values():
        Commit.from_record(record)
    for row in tables.tables["branches"].values():
        _ = [commits[commit] for commit in (row["head"], *row["retained"])]
    for row in tables.tables["snapshots"].values():
        _ = commits[row["commit"]]
    for row in tables.tables["packs"].values():
        PackRow.from_row(row)


def foreign_store(log: Log, index: IndexState, store_id: str | None) -> str | None:
    """The id of the other store that an index is of; None where it is of this one, or who knows.

    `store_id` is what FORMAT says. It is the index that is foreign only if the log agrees with
    that; else FORMAT or the log is, which the caller's stricter reading finds.
    """
    told = index.tables.get("meta", "store_id")
    if store_id is None or told is None or told == store_id:
        return None
    try:
        first = log.scan(log.sequences()[-1]).frames[0]
        logged = records.store_told_by(first.payload)
    except (OSError, ShardbError, IndexError):
        return None
    return str(told) if logged == store_id else None


def check_own(log: Log, index: IndexState, store_id: str | None, path: str) -> None:
    """Raise FormatError for the index of another store beside this one's FORMAT and log."""
    other = foreign_store(log, index, store_id)
    if other is not None:
        raise FormatError(
            f"{path}: it is the index of store {other}, and FORMAT and the log are of store "
            f"{store_id}: it was copied here by mistake, or they were. Put back what belongs here, "
            "or run `shardb repair`, which makes the index anew from the log",
            path=path,
        )


def disagreement(log: Log, index: IndexState) -> str | None:
    """What the index has that the log does not give at its position; None where they agree.

    Replays the one segment that the index has reached. None too where the log cannot tell: whether
    it is the log that the index has seen is for the caller's stricter reading to judge.
    """
    applied = index.applied
    try:
        if not applied.lsn and any(index.tables.tables.values()):
            return "entries, but not the position in the log that they reflect"
        if not applied.lsn or log.size_bytes(applied.sequence) > REPLAYED_BYTES_MAX:
            return None
        tables = DictTables()
        for frame in log.scan(applied.sequence).frames:
            state.apply(tables, records.unpack(frame.payload))
            state.sweep(tables, ())
            if (frame.lsn, frame.digest) == (applied.lsn, applied.digest):
                return _first(position_differences(index, frame, applied.sequence, tables))
    except (OSError, ShardbError, AssertionError):
        return None
    return None


def position_differences(
    index: IndexState, frame: Frame, sequence: int, tables: DictTables
) -> list[Difference]:
    """Where an index differs from the log, `frame` being the record that it applied last."""
    told, is_at = (index.applied.sequence, index.applied.offset), (sequence, frame.end)
    found = differences(index.tables, tables)
    if told != is_at:
        expected, actual = (f"segment {s}, byte {offset}" for s, offset in (is_at, told))
        found.append(Difference(table="meta", key="applied", expected=expected, found=actual))
    return found


def _first(found: list[Difference]) -> str | None:
    return f"{found[0].table} {found[0].key}: {found[0].found}" if found else None


def differences(index: DictTables, log: DictTables) -> list[Difference]:
    """Where the index differs from the tables that the log gives at the same position."""
    found = list(_in_meta(index, log))
    for table in COMPARED:
        found.extend(_in_table(table, _live(index, table), _live(log, table)))
    found.extend(_in_table("packs", held_packs(index), held_packs(log)))
    counted = count_references(index.tables["commits"], index.tables["packs"])
    found.extend(_in_table("objects", index.tables["objects"], counted))
    return found


def count_references(commits: dict[str, Any], packs: dict[str, Any]) -> dict[str, list[int]]:
    """Digest to bytes and number of references, as commits and packed objects say."""
    counted: dict[str, list[int]] = {}
    for record in commits.values():
        for digest, size, *_ in record["shards"].values():
            entry = counted.setdefault(bytes(digest).hex(), [size, 0])
            entry[1] += 1
    for row in map(PackRow.from_row, packs.values()):
        if row.base is not None:
            entry = counted.setdefault(row.base, [row.bytes, 0])
            entry[1] += 1
    return counted


def _in_meta(index: DictTables, log: DictTables) -> Iterator[Difference]:
    keys = [key for key in META_KEPT if key in index.tables["meta"] or key in log.tables["meta"]]
    rows = [{key: tables.get("meta", key) for key in keys} for tables in (index, log)]
    yield from _in_table("meta", *rows)


def _live(tables: DictTables, table: str) -> dict[str, Any]:
    rows = tables.tables[table]
    if table != "commits":
        return rows
    condemned = tables.tables["condemned"]
    return {key: row for key, row in rows.items() if key not in condemned}


def _in_table(table: str, index: dict[str, Any], log: dict[str, Any]) -> Iterator[Difference]:
    for key in sorted(index.keys() | log.keys()):
        expected, found = log.get(key), index.get(key)
        # Compared as bytes: a metric that is no number is not equal to itself.
        if msgpack.packb(expected) != msgpack.packb(found):
            yield Difference(table=table, key=key, expected=_short(expected), found=_short(found))


def _short(row: Any) -> str:
    text = "no entry" if row is None else repr(row)
    return text if len(text) <= 200 else f"{text[:200]}…"
