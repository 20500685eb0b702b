"""The nouns of the store: tensor specifications, shard entries, commits and log records.

Owns their msgpack form. A record is a plain mapping with `kind`, `id` and `time`; commits are
records of kind "commit" and have a dataclass of their own because every client handles them.
Knows nothing of files, the index or retention.
"""

from __future__ import annotations

import os
import time as clock
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgpack

from shardb.errors import LogDamagedError, UsageError

Record = dict[str, Any]

RECORD_KINDS = frozenset(
    "init begin commit abort branch snapshot delete rewind gc policy note checkpoint pack "
    "unpack repair".split()
)
DIGEST_BYTES = 16
_COMMIT_FIELDS: Mapping[str, Any] = {
    "id": str,
    "branch": str,
    "step": int,
    "parent": str | None,
    "shards": dict,
    "time": int | float,
    "state": dict,
    "metrics": dict,
    "statistics": dict,
    "recipe": str | None,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardEntry:
    """One shard of a commit: digest (32 hex digits), size in bytes, step that last wrote it."""

    digest: str
    bytes: int
    step: int
    trainable: bool = True

    def to_record(self) -> list[Any]:
        """The entry as a commit record holds it."""
        return [bytes.fromhex(self.digest), self.bytes, self.step, self.trainable]

    @staticmethod
    def from_record(values: Sequence[Any]) -> ShardEntry:
        """Read an entry; TypeError or ValueError when it is none."""
        digest, size, step, trainable = values
        if type(digest) is not bytes or type(size) is not int or type(step) is not int:
            raise TypeError("a shard's entry is not digest, size, step and whether it is trainable")
        if len(digest) != DIGEST_BYTES or size <= 0 or step < 0:
            raise ValueError(f"a shard's entry has {len(digest)} bytes of digest, size {size}")
        return ShardEntry(digest=digest.hex(), bytes=size, step=step, trainable=trainable is True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """One complete set of shards, with step, state and metrics.

    `state` is the trainer's small state, `metrics` what it measured, `statistics` what it knows
    of single shards; all of them hold only what msgpack can. `time` is seconds since 1970.
    """

    id: str
    branch: str
    step: int
    parent: str | None
    shards: Mapping[str, ShardEntry]
    time: float
    state: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    statistics: Mapping[str, Any] = field(default_factory=dict)
    recipe: str | None = None

    def to_record(self) -> Record:
        """The commit as a log record."""
        return {
            "kind": "commit",
            "id": self.id,
            "time": self.time,
            "branch": self.branch,
            "step": self.step,
            "parent": self.parent,
            "shards": {name: entry.to_record() for name, entry in self.shards.items()},
            "state": dict(self.state),
            "metrics": dict(self.metrics),
            "statistics": dict(self.statistics),
            "recipe": self.recipe,
        }

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> Commit:
        """Read a commit record; LogDamagedError when a field is missing or of the wrong type."""
        try:
            for name, kinds in _COMMIT_FIELDS.items():
                if not isinstance(record[name], kinds) or isinstance(record[name], bool):
                    raise TypeError(f"{name} is a {type(record[name]).__name__}")
            entries = record["shards"].items()
            fields = {name: record[name] for name in _COMMIT_FIELDS}
            shards = {name: ShardEntry.from_record(values) for name, values in entries}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LogDamagedError(f"a commit record lacks or garbles a field: {error!r}") from error
        return Commit(**{**fields, "shards": MappingProxyType(shards)})


def new_id() -> str:
    """A unique id: 32 hex digits, the first 12 of them milliseconds since 1970 (as UUID 7 has)."""
    milliseconds = clock.time_ns() // 1_000_000
    return f"{milliseconds & 0xFFFFFFFFFFFF:012x}{os.urandom(10).hex()}"


def new_record(kind: str, **fields: Any) -> Record:
    """A record of `kind` with a fresh id and the wall-clock time."""
    assert kind in RECORD_KINDS
    return {"kind": kind, "id": new_id(), "time": clock.time(), **fields}


def stored_form(what: str, value: Mapping[str, Any] | None) -> dict[str, Any]:
    """A client's mapping as it will be read back; UsageError when it cannot be.

    Read back here because the encoder takes more than the decoder: a mapping with whole numbers as
    keys would be written, and then the store could not be opened any more.
    """
    try:
        packed = msgpack.packb(dict(value or {}), use_bin_type=True)
        form: dict[str, Any] = msgpack.unpackb(packed, raw=False, strict_map_key=True)
    except Exception as error:  # the codec's own classes differ between versions
        raise UsageError(
            f"{what} holds a value that cannot be stored ({error}); use None, booleans, numbers, "
            "strings, lists, and mappings with strings as keys"
        ) from error
    return form


def pack(record: Mapping[str, Any]) -> bytes:
    """Encode a record, whose foreign parts went through `stored_form`."""
    packed: bytes = msgpack.packb(record, use_bin_type=True)
    return packed


def unpack(payload: bytes) -> Record:
    """Decode a record; LogDamagedError when it is none."""
    try:
        record = msgpack.unpackb(payload, raw=False, strict_map_key=True)
    except Exception as error:  # the decoder's own classes differ between versions
        raise LogDamagedError(f"a log record is no msgpack mapping: {error}") from error
    kind = record.get("kind") if isinstance(record, dict) else None
    if not isinstance(kind, str) or kind not in RECORD_KINDS:
        raise LogDamagedError(
            "a log record is of no known kind; was it written by a newer version?"
        )
    return dict(record)


def store_told_by(payload: bytes) -> str | None:
    """The id of the store as the record that begins a segment tells it; None of another record."""
    try:
        record = unpack(payload)
        return str(record.get("store_id") or record["state"]["meta"]["store_id"])
    except (LogDamagedError, KeyError, TypeError):
        return None
