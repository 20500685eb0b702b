"""Lineage: the steps between two commits, as a log tells them.

Owns the walk from a commit back to an earlier one, over records read newest first, and the form in
which a copied commit carries the steps it skipped (`rolled_up`). Needed twice in a copy: to know
that the target's head is an ancestor, and so that the target's history has no gap.

A record is found by its id, or inside what a later one rolled up. A parent's record always stands
before its children's, so one pass is enough. Only as much of the log is read as is needed: for a
commit that is published every few steps, the end of the last segment.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardb import records
from shardb.errors import LogDamagedError
from shardb.records import Record
from shardb.storage_errors import storage_errors

if TYPE_CHECKING:
    from shardb.looking import Looking


@dataclass(frozen=True, kw_only=True, slots=True)
class PastStep:
    """A step that was committed somewhere; `bytes` are those of the shards it wrote."""

    commit: str
    parent: str | None
    branch: str
    step: int
    time: float
    bytes: int
    metrics: Mapping[str, Any] = field(default_factory=dict)

    def to_record(self) -> dict[str, Any]:
        return {
            "id": self.commit,
            "parent": self.parent,
            "branch": self.branch,
            "step": self.step,
            "time": self.time,
            "bytes": self.bytes,
            "metrics": dict(self.metrics),
        }

    @staticmethod
    def from_record(entry: Mapping[str, Any]) -> PastStep:
        """Read an entry of `rolled_up`; LogDamagedError when a field is missing or wrong."""
        try:
            return PastStep(
                commit=str(entry["id"]),
                parent=entry["parent"],
                branch=str(entry["branch"]),
                step=int(entry["step"]),
                time=float(entry["time"]),
                bytes=int(entry["bytes"]),
                metrics=dict(entry["metrics"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise LogDamagedError(
                f"a rolled up step lacks or garbles a field: {error!r}"
            ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """The steps from behind `reached` (or from the first one) up to before a commit, oldest first.

    `reached` is the one of the wanted ends that was found, None where none was. `complete` is False
    where the history ends before it should: a part of the log is lost.
    """

    steps: list[PastStep]
    reached: str | None
    complete: bool


class Walk:
    """A walk back from `commit` to any of `ends`; feed it records, newest first, until `ended`."""

    def __init__(self, commit: str, ends: Collection[str]) -> None:
        self._start = commit
        self._ends = ends
        self._steps: list[PastStep] = []
        self.reached = commit if commit in ends else None
        self.wanted: str | None = commit

    @property
    def ended(self) -> bool:
        """Nothing before what was met is wanted."""
        return self.reached is not None or self.wanted is None

    def meet(self, record: Record) -> None:
        """Take from a commit record what belongs to the line."""
        if self.ended:
            return
        rolled_up = record.get("rolled_up") or []
        if record["id"] == self.wanted:
            if record["id"] != self._start:
                self._take(past_step(record))
        else:
            rolled_up = self._up_to_wanted(rolled_up)
            if not rolled_up:
                return
        for entry in reversed(rolled_up):
            self._take(PastStep.from_record(entry))
        self._go_back_to(record["parent"])

    def _up_to_wanted(self, rolled_up: list[Any]) -> list[Any]:
        for position, entry in enumerate(rolled_up):
            if entry["id"] == self.wanted:
                if self.wanted == self._start:
                    return rolled_up[:position]
                return rolled_up[: position + 1]
        return []

    def _take(self, step: PastStep) -> None:
        if self.reached is None and step.commit in self._ends:
            self.reached = step.commit
        if self.reached is None:
            self._steps.append(step)

    def _go_back_to(self, parent: str | None) -> None:
        if self.reached is None and parent in self._ends:
            self.reached = parent
        self.wanted = parent

    def lineage(self) -> Lineage:
        """What was found."""
        return Lineage(
            steps=self._steps[::-1],
            reached=self.reached,
            complete=self.ended,
        )


def past_step(record: Record) -> PastStep:
    """What a commit record tells of its step."""
    commit = records.Commit.from_record(record)
    written = {e.digest: e.bytes for e in commit.shards.values() if e.step == commit.step}
    return PastStep(
        commit=commit.id,
        parent=commit.parent,
        branch=commit.branch,
        step=commit.step,
        time=commit.time,
        bytes=sum(written.values()),
        metrics=commit.metrics,
    )


def lineage(store: Looking, commit: str, ends: Collection[str]) -> Lineage:
    """Walk a store's log back from `commit` to the first of `ends`, or to the beginning.

    Where a part of the log cannot be read, the walk ends there and `complete` is False. Raises
    StorageFailedError when the storage does not even say which parts there are.
    """
    walk = Walk(commit, ends)
    with storage_errors(store.files, store.root, "reading the log"):
        for record in _commits_backward(store):
            walk.meet(record)
            if walk.ended:
                break
    return walk.lineage()


def _commits_backward(store: Looking) -> Iterator[Record]:
    """Commit records of a log, newest first; it ends where a segment is missing or unreadable."""
    newer: int | None = None
    for sequence in reversed(store.log.sequences()):
        if newer is not None and sequence != newer - 1:
            return
        newer = sequence
        try:
            frames = store.log.scan(sequence).frames
        except (OSError, LogDamagedError):
            return
        for frame in reversed(frames):
            record = records.unpack(frame.payload)
            if record["kind"] == "commit":
                yield record
            elif record["kind"] == "snapshot" and record.get("received"):
                yield record["received"]
