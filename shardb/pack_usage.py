"""Where the space of a store goes: by branch and by snapshot, and what packing saves.

Owns the counting, over the tables alone, so that it takes the same short time however large the
objects are. Three sizes of a set of objects: `logical` is what they hold, each commit counted in
full; `stored` is what their files take, each object once; `unique` is the part of that which would
be free if this name alone were gone. A base counts for whatever is a difference to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shardb.records import Commit
from shardb.references import PackRow, pack_rows
from shardb.state import Tables


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What one branch or snapshot takes, in bytes; `commits` are those that it keeps."""

    kind: str
    name: str
    commits: int
    steps: tuple[int, int]
    objects: int
    packed_objects: int
    logical_bytes: int
    stored_bytes: int
    unique_bytes: int
    saved_bytes: int


@dataclass(frozen=True, kw_only=True)
class StoreUsage:
    """What all names of a store take together, in bytes."""

    names: list[Usage]
    objects: int
    packed_objects: int
    whole_bytes: int
    stored_bytes: int

    @property
    def saved_bytes(self) -> int:
        """What packing saves."""
        return self.whole_bytes - self.stored_bytes

    def to_json(self) -> dict[str, Any]:
        return {
            "names": [
                {name: getattr(item, name) for name in Usage.__slots__} for item in self.names
            ],
            "objects": self.objects,
            "packed_objects": self.packed_objects,
            "whole_bytes": self.whole_bytes,
            "stored_bytes": self.stored_bytes,
            "saved_bytes": self.saved_bytes,
        }


def usage(tables: Tables) -> StoreUsage:
    """Count what every branch and every snapshot keeps."""
    counting = _Counting(tables)
    kept = {
        **{("branch", name): row["retained"] for name, row in tables.items("branches")},
        **{("snapshot", name): [row["commit"]] for name, row in tables.items("snapshots")},
    }
    if abandoned := [commit for commit, _ in tables.items("abandoned")]:
        kept["rewound", "(until gc)"] = abandoned
    needed = {name: counting.needed(commits) for name, commits in kept.items()}
    times = Counter(digest for digests in needed.values() for digest in digests)
    names = [
        counting.of_name(*name, kept[name], digests, times) for name, digests in needed.items()
    ]
    rows = {digest: counting.packs[digest] for digest in times if digest in counting.packs}
    return StoreUsage(
        names=names,
        objects=len(times),
        packed_objects=len(rows),
        whole_bytes=sum(counting.bytes_of[digest] for digest in times),
        stored_bytes=sum(counting.stored(digest) for digest in times),
    )


class _Counting:
    """Objects and commits as the tables have them."""

    def __init__(self, tables: Tables) -> None:
        self.packs: dict[str, PackRow] = pack_rows(tables)
        self.bytes_of = {digest: row[0] for digest, row in tables.items("objects")}
        self.commits = {key: Commit.from_record(row) for key, row in tables.items("commits")}

    def needed(self, commits: Iterable[str]) -> set[str]:
        """The objects of commits, and what those are differences to."""
        entries = (e for commit in commits for e in self.commits[commit].shards.values())
        found: set[str] = set()
        for entry in entries:
            at: str | None = entry.digest
            while at is not None and at not in found:
                found.add(at)
                at = self.packs[at].base if at in self.packs else None
        return found

    def stored(self, digest: str) -> int:
        """Bytes of an object's file."""
        row = self.packs.get(digest)
        return self.bytes_of[digest] if row is None else row.packed_bytes

    def of_name(
        self, kind: str, name: str, commits: list[str], digests: set[str], times: Counter[str]
    ) -> Usage:
        """What one name takes; `times` is how many names need an object."""
        steps = [self.commits[commit].step for commit in commits]
        entries = [e for commit in commits for e in self.commits[commit].shards.values()]
        whole_bytes = sum(self.bytes_of[digest] for digest in digests)
        stored_bytes = sum(map(self.stored, digests))
        return Usage(
            kind=kind,
            name=name,
            commits=len(commits),
            steps=(min(steps), max(steps)),
            objects=len(digests),
            packed_objects=sum(digest in self.packs for digest in digests),
            logical_bytes=sum(entry.bytes for entry in entries),
            stored_bytes=stored_bytes,
            unique_bytes=sum(self.stored(digest) for digest in digests if times[digest] == 1),
            saved_bytes=whole_bytes - stored_bytes,
        )
