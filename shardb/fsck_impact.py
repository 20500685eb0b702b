"""Who is hit by a damaged object: shards, branches, steps, snapshots, and what is intact nearby.

Owns the way from an object to the commits that need it. Knows only tables, no files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from shardb import refs
from shardb.findings import Finding
from shardb.fsck_objects import ObjectFault, Wanted
from shardb.records import Commit
from shardb.references import CHAIN_MAX, pack_rows
from shardb.state import DictTables


def needed_objects(tables: DictTables) -> dict[str, Wanted]:
    """Every object that a commit needs, by digest; bases first, then those of old steps."""
    commits = [Commit.from_record(record) for _, record in tables.items("commits")]
    commits.sort(key=lambda commit: (commit.step, commit.time))
    packs = pack_rows(tables)
    sizes = {row.base: row.bytes for row in packs.values() if row.base is not None}
    sizes |= {e.digest: e.bytes for commit in commits for e in commit.shards.values()}
    return {d: Wanted(digest=d, bytes=size, pack=packs.get(d)) for d, size in sizes.items()}


def with_deltas(digests: Collection[str], tables: DictTables) -> set[str]:
    """These objects and all that are packed as a difference to them, however far."""
    packs, found = pack_rows(tables), set(digests)
    for _ in range(CHAIN_MAX):
        found |= {digest for digest, row in packs.items() if row.base in found}
    return found


def digests_of(commit: Commit) -> set[str]:
    """The digests of a commit's objects."""
    return {entry.digest for entry in commit.shards.values()}


def branches_with(commits: Collection[str], tables: DictTables) -> list[str]:
    """The branches that end at one of these commits, or keep one, sorted by name."""
    return sorted(
        name
        for name, row in tables.items("branches")
        if not {row["head"], *row["retained"]}.isdisjoint(commits)
    )


def object_finding(
    digest: str,
    fault: ObjectFault,
    tables: DictTables,
    damaged: Collection[str],
    *,
    next_command: str | None,
) -> Finding:
    """The finding for one damaged object; `damaged` are all that cannot be read (`with_deltas`)."""
    retained = refs.live_commits(tables)
    unreadable = with_deltas({digest}, tables)
    hit = [commit for commit in retained if not unreadable.isdisjoint(digests_of(commit))]
    hit_ids = {commit.id for commit in hit}
    snapshots = [n for n, row in tables.items("snapshots") if row["commit"] in hit_ids]
    shards = {n for c in hit for n, entry in c.shards.items() if entry.digest in unreadable}
    nearest = nearest_intact(hit, retained, damaged)
    lines = {commit.branch for commit in hit}
    return Finding(
        kind=fault.kind,
        severity="error",
        path=fault.path,
        offset=fault.offset,
        expected=fault.expected,
        found=_whose_bytes(fault.found, retained),
        shards=tuple(sorted(shards)),
        branches=tuple(branches_with(hit_ids, tables)),
        steps=tuple(sorted({commit.step for commit in hit})),
        snapshots=tuple(sorted(snapshots)),
        nearest_intact_step=None if nearest is None else nearest.step,
        nearest_intact_branch=_branch_elsewhere(nearest, lines),
        next_command=next_command,
    )


def _branch_elsewhere(commit: Commit | None, lines: set[str]) -> str | None:
    """The branch that a commit was made on, unless these are that one alone."""
    return None if commit is None or lines == {commit.branch} else commit.branch


def nearest_intact(
    hit: Iterable[Commit], retained: Iterable[Commit], damaged: Collection[str]
) -> Commit | None:
    """The retained commit that needs no damaged object and is closest to those hit.

    Commits of a branch that is hit come before others; of two at the same distance, the later one.
    """
    hit = list(hit)
    intact = [commit for commit in retained if digests_of(commit).isdisjoint(damaged)]
    if not hit or not intact:
        return None
    branches = {commit.branch for commit in hit}

    def distance(commit: Commit) -> tuple[bool, int, int]:
        steps = min(abs(commit.step - other.step) for other in hit)
        return (commit.branch not in branches, steps, -commit.step)

    return min(intact, key=distance)


def _whose_bytes(found: str, retained: Iterable[Commit]) -> str:
    """Say so when the bytes are those of another object: two files were exchanged."""
    for commit in retained:
        for name, entry in commit.shards.items():
            if found == f"digest {entry.digest}":
                return f"{found}: the bytes of shard {name} of step {entry.step}"
    return found
