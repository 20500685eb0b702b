"""Changing names and history: branches, rewinds, deletions, the retention policy.

Every change is one log record, made from the newest state under the log's lock. What a rewind
leaves behind stays until `gc`, so that it can be undone by rewinding again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardb import refs, state
from shardb.errors import ConflictError, NotFoundError, UsageError
from shardb.layout import check_name
from shardb.looking import Looking
from shardb.records import Commit, Record, new_record
from shardb.retention import Policy
from shardb.state import DictTables, Tables

if TYPE_CHECKING:
    from shardb.store import Store


def create_branch(store: Store, name: str, ref: str | None = None) -> Commit:
    """Make a branch that points to the commit `ref` names. Constant time; copies nothing.

    The same name for the same commit is fine; ConflictError when the branch is elsewhere or a
    snapshot has the name, UsageError for a bad name, NotFoundError when `ref` names nothing.
    """
    check_name(name, "branch")
    found: list[Commit] = []

    def make(tables: Tables) -> Record | None:
        commit = refs.resolve(tables, ref)
        found.append(commit)
        row = tables.get("branches", name)
        if row is not None and row["head"] != commit.id:
            raise ConflictError(f"branch {name!r} exists and is at commit {row['head']}")
        refs.check_new_branch(tables, name)
        return None if row is not None else new_record("branch", name=name, commit=commit.id)

    store.appender.change(make)
    return found[-1]


@dataclass(frozen=True, kw_only=True)
class Rewound:
    """Where a branch was, where it is, and which commits it kept and has left behind."""

    before: Commit
    after: Commit
    left: tuple[Commit, ...]


def rewind(store: Store, branch: str, ref: str) -> Rewound:
    """Move a branch back (or to any retained commit).

    Raises BranchLockedError beside a live writer, NotFoundError for unknown names.
    """
    ended: list[Rewound] = []

    def make(tables: Tables) -> Record | None:
        heads = refs.branch_heads(tables)
        if branch not in heads:
            raise NotFoundError(refs.no_such("branch", branch, heads))
        before, target = heads[branch], refs.resolve(tables, ref, branch=branch)
        retained = tables.get("branches", branch)["retained"]
        moved = before.id != target.id
        left = retained[retained.index(target.id) + 1 :] if target.id in retained else retained
        commits = [Commit.from_record(tables.get("commits", commit)) for commit in left if moved]
        ended.append(Rewound(before=before, after=target, left=tuple(commits)))
        if not moved:
            return None
        return new_record("rewind", branch=branch, to=target.id, origin=before.id)

    with _as_writer(store, branch):
        store.appender.change(make)
    return ended[-1]


def delete_snapshot(store: Store, name: str) -> Commit:
    """Remove a snapshot's name; its commit goes when nothing else pins it."""
    gone: list[Commit] = []

    def make(tables: Tables) -> Record:
        existing = refs.snapshot_commits(tables)
        if name not in existing:
            raise NotFoundError(refs.no_such("snapshot", name, existing))
        gone.append(existing[name])
        return deletion_record("snapshot", name)

    store.appender.change(make)
    return gone[-1]


def delete_branch(store: Store, name: str) -> Commit:
    """Remove a branch; UsageError for the last one, BranchLockedError beside its writer."""
    gone: list[Commit] = []

    def make(tables: Tables) -> Record:
        heads = refs.branch_heads(tables)
        if name not in heads:
            raise NotFoundError(refs.no_such("branch", name, heads))
        check_not_last(name, heads)
        gone.append(heads[name])
        return deletion_record("branch", name)

    with _as_writer(store, name):
        store.appender.change(make)
    return gone[-1]


def check_not_last(name: str, branches: Collection[str]) -> None:
    """Raise UsageError for the only branch of a store."""
    if len(branches) == 1:
        raise UsageError(f"branch {name!r} is the only one; removing it would leave no model")


def policy_of(store: Looking) -> Policy:
    """The retention policy in force."""
    return Policy.from_record(store.index.read(lambda tables: tables.get("meta", "policy")))


def set_policy(store: Store, policy: Policy) -> None:
    """Store a retention policy; it takes effect at once, on every branch."""
    store.appender.change(lambda _: policy_record(policy))


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What a change would give up for good: commits, and the bytes of objects only they need.

    `leased` are those of the commits that a reader holds: they go when it is done.
    """

    commits: tuple[Commit, ...]
    leased: frozenset[str]
    freed_bytes: int

    @property
    def steps(self) -> list[int]:
        """The steps of the commits."""
        return [commit.step for commit in self.commits]


def policy_record(policy: Policy) -> Record:
    """The record that stores a policy."""
    return new_record("policy", policy=policy.to_record())


def deletion_record(what: str, name: str) -> Record:
    """The record that removes a name; `what` is "snapshot" or "branch"."""
    return new_record("delete", what=what, name=name)


def would_lose(store: Looking, record: Record) -> Loss:
    """What a record would give up if it were appended now: a dry run, which changes nothing."""
    leased = {lease["commit"] for lease in store.leases.describe_all()}
    return store.index.read(lambda tables: _loss(tables, record, leased))


def _loss(tables: Tables, record: Record, leased: Collection[str]) -> Loss:
    after = DictTables.copy_of(tables)
    before = set(after.tables["condemned"])
    state.apply(after, record)
    gone = after.tables["condemned"].keys() - before
    commits = [Commit.from_record(tables.get("commits", commit)) for commit in gone]
    retired = state.sweep(after, after.tables["condemned"].keys() - gone)
    return Loss(
        commits=tuple(sorted(commits, key=lambda commit: (commit.step, commit.time))),
        leased=frozenset(gone.intersection(leased)),
        freed_bytes=sum(item.bytes for item in retired),
    )


@contextmanager
def _as_writer(store: Store, branch: str) -> Iterator[None]:
    """Hold a branch's lock for a block, unless this store holds it anyway."""
    held = store.locks.holds_branch(branch)
    with store.appender.errors(f"changing branch {branch!r}"):
        store.locks.take_branch(branch)
        try:
            yield
        finally:
            if not held:
                store.locks.release_branch(branch)
