"""The nouns of the store: tensor specifications, shard entries, commits and log records.

Owns their msgpack form. A record is a plain mapping with `kind`, `id` and `time`; commits are
records of kind "commit" and have a dataclass of their own because every client handles them.
Knows nothing of files, the index or retention.
"""

from __future__ import annotations

import os
import time as clock
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgpack

from shardb.errors import LogDamagedError, UsageError

Record = dict[str, Any]

RECORD_KINDS = frozenset(
    "init begin commit abort branch snapshot delete rewind gc policy note checkpoint".split()
)
# A hostile log must not make the decoder allocate more than its own size allows.
_NESTING_LIMIT = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardEntry:
    """One shard of a commit: digest (32 hex digits), size in bytes, step that last wrote it."""

    digest: str
    bytes: int
    step: int
    trainable: bool = True


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
            "shards": {
                name: [bytes.fromhex(entry.digest), entry.bytes, entry.step, entry.trainable]
                for name, entry in self.shards.items()
            },
            "state": dict(self.state),
            "metrics": dict(self.metrics),
            "statistics": dict(self.statistics),
            "recipe": self.recipe,
        }

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> Commit:
        """Read a commit record; LogDamagedError when a field is missing or of the wrong type."""
        try:
            shards = {
                str(name): ShardEntry(
                    digest=bytes(digest).hex(),
                    bytes=int(size),
                    step=int(step),
                    trainable=bool(trainable),
                )
                for name, (digest, size, step, trainable) in record["shards"].items()
            }
            return Commit(
                id=record["id"],
                branch=record["branch"],
                step=record["step"],
                parent=record["parent"],
                shards=MappingProxyType(shards),
                time=record["time"],
                state=record["state"],
                metrics=record["metrics"],
                statistics=record["statistics"],
                recipe=record["recipe"],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LogDamagedError(f"a commit record lacks or garbles a field: {error!r}") from error


def new_id() -> str:
    """A unique id: 32 hex digits, the first 12 of them milliseconds since 1970 (as UUID 7 has)."""
    milliseconds = clock.time_ns() // 1_000_000
    return f"{milliseconds & 0xFFFFFFFFFFFF:012x}{os.urandom(10).hex()}"


def new_record(kind: str, **fields: Any) -> Record:
    """A record of `kind` with a fresh id and the wall-clock time."""
    assert kind in RECORD_KINDS
    return {"kind": kind, "id": new_id(), "time": clock.time(), **fields}


def pack(record: Mapping[str, Any]) -> bytes:
    """Encode a record; UsageError when it holds something that msgpack cannot."""
    try:
        packed: bytes = msgpack.packb(record, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"state, metrics or statistics hold a value that cannot be stored ({error}); "
            "use None, booleans, numbers, strings, lists and mappings"
        ) from error
    return packed


def unpack(payload: bytes) -> Record:
    """Decode a record; LogDamagedError when it is none."""
    try:
        record = msgpack.unpackb(payload, raw=False, strict_map_key=True)
    except Exception as error:  # the decoder's own classes differ between versions
        raise LogDamagedError(f"a log record is no msgpack mapping: {error}") from error
    if not isinstance(record, dict) or record.get("kind") not in RECORD_KINDS:
        raise LogDamagedError(
            "a log record is of no known kind; was it written by a newer version?"
        )
    return record
