"""Changing names and history: branches, rewinds, deletions, the retention policy.

Every change is one log record, made from the newest state under the log's lock. What a rewind
leaves behind stays until `gc`, so that it can be undone by rewinding again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardb import refs
from shardb.errors import ConflictError, NotFoundError, UsageError
from shardb.layout import check_name
from shardb.records import Commit, Record, new_record
from shardb.retention import Policy, kept
from shardb.state import Tables

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


def rewind(store: Store, branch: str, ref: str) -> tuple[Commit, Commit]:
    """Move a branch back (or to any retained commit); return where it was and where it is.

    Raises BranchLockedError beside a live writer, NotFoundError for unknown names.
    """
    ended: list[tuple[Commit, Commit]] = []

    def make(tables: Tables) -> Record | None:
        heads = refs.branch_heads(tables)
        if branch not in heads:
            raise NotFoundError(refs.no_such("branch", branch, heads))
        before, target = heads[branch], refs.resolve(tables, ref, branch=branch)
        ended.append((before, target))
        if before.id == target.id:
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
        return new_record("delete", what="snapshot", name=name)

    store.appender.change(make)
    return gone[-1]


def delete_branch(store: Store, name: str) -> Commit:
    """Remove a branch; UsageError for the last one, BranchLockedError beside its writer."""
    gone: list[Commit] = []

    def make(tables: Tables) -> Record:
        heads = refs.branch_heads(tables)
        if name not in heads:
            raise NotFoundError(refs.no_such("branch", name, heads))
        if len(heads) == 1:
            raise UsageError(f"branch {name!r} is the only one; removing it would leave no model")
        gone.append(heads[name])
        return new_record("delete", what="branch", name=name)

    with _as_writer(store, name):
        store.appender.change(make)
    return gone[-1]


def policy_of(store: Store) -> Policy:
    """The retention policy in force."""
    return Policy.from_record(store.index.read(lambda tables: tables.get("meta", "policy")))


def set_policy(store: Store, policy: Policy) -> None:
    """Store a retention policy; it takes effect at once, on every branch."""
    store.appender.change(lambda _: new_record("policy", policy=policy.to_record()))


def would_drop(store: Store, policy: Policy) -> dict[str, list[Commit]]:
    """What a policy would let go, by branch: a dry run. Snapshots are not counted in."""

    def body(tables: Tables) -> dict[str, list[Commit]]:
        dropped: dict[str, list[Commit]] = {}
        for name, row in tables.items("branches"):
            keep = kept(policy, row["retained"], lambda c: tables.get("commits", c))
            gone = [c for c in row["retained"] if c not in keep]
            dropped[name] = [Commit.from_record(tables.get("commits", c)) for c in gone]
        return dropped

    return store.index.read(body)


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
