"""Which objects are packed, and against which base.

Owns the choice, over the tables alone. An object is cold when snapshots need it and neither a head
nor the newest commits of a branch do: those are read at every step. Its base is the same shard in
the snapshot before it, of its own branch where there is one, while the chain stays short.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shardb import refs
from shardb.errors import UsageError
from shardb.records import Commit, ShardEntry
from shardb.references import CHAIN_MAX, chain_of, held, pack_row, pack_rows
from shardb.retention import Policy
from shardb.state import Tables

# Less than this is not worth a file of another kind: files take whole pages on the disk.
OBJECT_BYTES_MIN = 16 << 10

HOT = "in use by a branch"
PACKED = "packed already"
SMALL = "too small"


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """A shard as one commit has it."""

    shard: str
    entry: ShardEntry
    commit: Commit

    @property
    def digest(self) -> str:
        return self.entry.digest


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """An object to pack, and the version before it, if that may be a base."""

    version: Version
    neighbour: Version | None


@dataclass(kw_only=True)
class Chosen:
    """What is to be packed, shard by shard and oldest first, and why the rest is not."""

    candidates: list[Candidate] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)


def choose(tables: Tables, wanted: Sequence[str] = ()) -> Chosen:
    """The cold objects of the snapshots that `wanted` names, of all of them where it names none.

    Raises NotFoundError for an unknown ref, UsageError for a commit that no snapshot pins.
    """
    snapshots = _by_step(refs.snapshot_commits(tables).values())
    selected = pinned(tables, wanted)
    hot, chosen, seen = hot_objects(tables), Chosen(), set[str]()
    for shard in sorted({name for commit in snapshots for name in commit.shards}):
        line = [
            Version(shard=shard, entry=commit.shards[shard], commit=commit)
            for commit in snapshots
            if shard in commit.shards
        ]
        for position, version in enumerate(line):
            if version.commit.id not in selected or version.digest in seen:
                continue
            seen.add(version.digest)
            reason = _why_not(tables, version, hot)
            if reason is not None:
                chosen.skipped[reason] += 1
                continue
            neighbour = _neighbour(version, line[:position])
            chosen.candidates.append(Candidate(version=version, neighbour=neighbour))
    return chosen


def pinned(tables: Tables, wanted: Sequence[str]) -> set[str]:
    """The ids of the commits that `wanted` names; of every snapshot's where it names none."""
    ids = {commit.id for commit in refs.snapshot_commits(tables).values()}
    if not wanted:
        return ids
    found = {ref: refs.resolve(tables, ref) for ref in wanted}
    for ref, commit in found.items():
        if commit.id not in ids:
            raise UsageError(
                f"{ref!r} is step {commit.step}, which no snapshot keeps: only snapshots are "
                f"packed. Keep it with `shardb snapshot STORE NAME --ref {ref}` first"
            )
    return {commit.id for commit in found.values()}


def hot_objects(tables: Tables) -> set[str]:
    """The objects of every branch's newest commits, as many as its policy keeps anyway."""
    newest = Policy.from_record(tables.get("meta", "policy")).keep_last
    commits = {c for _, row in tables.items("branches") for c in row["retained"][-newest:]}
    records = (Commit.from_record(tables.get("commits", commit)) for commit in commits)
    return {entry.digest for commit in records for entry in commit.shards.values()}


def _by_step(commits: Iterable[Commit]) -> list[Commit]:
    unique = {commit.id: commit for commit in commits}
    return sorted(unique.values(), key=lambda commit: (commit.step, commit.time))


def _why_not(tables: Tables, version: Version, hot: set[str]) -> str | None:
    if pack_row(tables, version.digest) is not None:
        return PACKED
    if version.digest in hot:
        return HOT
    return SMALL if version.entry.bytes < OBJECT_BYTES_MIN else None


def _neighbour(version: Version, before: list[Version]) -> Version | None:
    """The newest other version before this one, first of the same branch."""
    others = [
        other
        for other in reversed(before)
        if other.digest != version.digest and other.entry.bytes == version.entry.bytes
    ]
    own = [other for other in others if other.commit.branch == version.commit.branch]
    return next(iter([*own, *others]), None)


class Chains:
    """How long chains are, seen from their far end: what is a difference against an object.

    Made once for a packing. Others only make chains shorter meanwhile, so it errs to the safe side.
    """

    def __init__(self, tables: Tables) -> None:
        self._deltas: dict[str, set[str]] = {}
        for digest, row in pack_rows(tables).items():
            self.add(digest, row.base)

    def add(self, digest: str, base: str | None) -> None:
        """Say that an object was packed."""
        if base is not None:
            self._deltas.setdefault(base, set()).add(digest)

    def above(self, digest: str) -> int:
        """How many packed objects at most lie on the way from a delta down to this one."""
        deltas = self._deltas.get(digest, ())
        return max((1 + self.above(delta) for delta in deltas), default=0)

    def allows(self, tables: Tables, digest: str, base: str | None) -> bool:
        """Whether an object may be packed against a base, or against none."""
        if base is None:
            return 1 + self.above(digest) <= CHAIN_MAX
        chain = chain_of(tables, base)
        rows = [pack_row(tables, member) for member in chain]
        needed = {base, *chain, *(row.base for row in rows if row is not None)}
        return digest not in needed and 1 + len(chain) + self.above(digest) <= CHAIN_MAX


def may_pack(tables: Tables, digest: str, base: str | None) -> bool:
    """Whether an object and its base are still needed, and the object is stored whole.

    Needed by a pinned commit: what a reader's lease alone keeps may be gone when the log is read
    again, and then the record could not be applied.
    """
    wanted = {digest} if base is None else {digest, base}
    return pack_row(tables, digest) is None and held(tables, wanted) == wanted


def may_unpack(tables: Tables, digest: str) -> bool:
    """Whether an object is packed, and needed by a pinned commit."""
    return pack_row(tables, digest) is not None and bool(held(tables, {digest}))
