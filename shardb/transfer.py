"""Copying commits and snapshots between stores on paths, and cloning a whole store.

Owns what a client calls; `shardb.transfer_receive` does the receiving, `shardb.remote` the same for
object storage. Copies are incremental by construction: objects that the target holds are not copied
again, and an interrupted copy goes on where it stopped. The source's commit is leased meanwhile,
or, where the source cannot be written, only looked at: every digest is checked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from shardb import branching
from shardb.errors import ConflictError, NotFoundError
from shardb.read_only import ReadOnlyStore
from shardb.read_view import CommitView
from shardb.records import Commit, Record
from shardb.refs import no_such
from shardb.state import DEFAULT_BRANCH
from shardb.store import Store
from shardb.transfer_lineage import lineage
from shardb.transfer_receive import (
    UNCHECKED,
    ExpectedHead,
    Incoming,
    receive_commit,
    receive_snapshot,
)
from shardb.transfer_source import StoreSource
from shardb.transfer_tally import Tally

Source = Store | ReadOnlyStore


@dataclass(frozen=True, kw_only=True)
class Cloned:
    """What a clone has: branches and snapshots with their commits."""

    branches: dict[str, Commit]
    snapshots: dict[str, Commit]


def copy_commit(
    source: Source,
    target: Store,
    ref: str | None = None,
    branch: str | None = None,
    *,
    expected_head: ExpectedHead = UNCHECKED,
    tally: Tally | None = None,
) -> Commit:
    """Make the commit that `ref` names the head of a branch of `target`.

    `branch` is by default the one that `ref` names, else the commit's own. Only forward: see
    `receive_commit` for the errors.
    """
    with source.at(ref=ref) as view:
        branch = branch or branch_of(ref, view.commit, source.branches())
        return copy_leased(source, view, target, branch, expected_head=expected_head, tally=tally)


def copy_leased(
    source: Source,
    view: CommitView,
    target: Store,
    branch: str | None = None,
    *,
    expected_head: ExpectedHead = UNCHECKED,
    tally: Tally | None = None,
) -> Commit:
    """`copy_commit` of a commit that is leased already."""
    incoming = Incoming(record=record_of(source, view.commit), source=StoreSource(source))
    received = receive_commit(
        target,
        incoming,
        branch or view.commit.branch,
        expected_head=expected_head,
        tally=tally,
    )
    view.close()  # every digest was checked
    return received


def copy_snapshot(
    source: Source, target: Store, name: str, *, tally: Tally | None = None
) -> Commit:
    """Copy a snapshot under its name. Moves no branch; SnapshotExistsError for another commit."""
    with source.snapshot(name) as view:
        incoming = Incoming(record=record_of(source, view.commit), source=StoreSource(source))
        received = receive_snapshot(target, incoming, name, tally=tally)
        view.close()
        return received


def branch_of(ref: str | None, commit: Commit, branches: Collection[str]) -> str:
    """The branch a commit is copied to when nobody says: a new branch has its base's commit."""
    named = DEFAULT_BRANCH if ref is None else ref
    return named if named in branches else commit.branch


def record_of(source: Source, commit: Commit) -> Record:
    """The record of a leased commit, with what only records say."""
    found: Record = source.index.read(lambda tables: tables.get("commits", commit.id))
    return found


def clone(
    source: Source,
    target: Store,
    *,
    branches: Iterable[str] | None = None,
    snapshots: Iterable[str] | None = None,
    retained: bool = False,
    tally: Tally | None = None,
) -> Cloned:
    """Copy branches (all, or those named), snapshots likewise, and the retention policy.

    `target` is a new store, or one that an interrupted clone left. With `retained` all commits that
    the branches keep are copied, not only their heads. Raises NotFoundError for unknown names,
    ConflictError when the target holds something that the source does not know, and when a name is
    removed before it was copied.
    """
    heads, pinned = source.branches(), source.snapshots()
    wanted_branches = chosen("branch", branches, heads)
    wanted_snapshots = chosen("snapshot", snapshots, pinned)
    _check_part_of(source, target)
    policy = branching.policy_of(source)
    if branching.policy_of(target) != policy:
        branching.set_policy(target, policy)
    # Told as they arrive: on a full disk the target's index is behind its log.
    cloned = Cloned(branches={}, snapshots={})
    for name in wanted_branches:
        with told_if_gone(source.root, f"branch {name!r}"):
            if retained:
                _copy_line(source, target, name, tally)
            with source.at(branch=name) as view:  # a live writer retires heads: look, and lease
                cloned.branches[name] = copy_leased(source, view, target, name, tally=tally)
    for name in wanted_snapshots:
        with told_if_gone(source.root, f"snapshot {name!r}"):
            cloned.snapshots[name] = copy_snapshot(source, target, name, tally=tally)
    return cloned


def chosen(what: str, wanted: Iterable[str] | None, existing: Mapping[str, object]) -> list[str]:
    """The names that are wanted, by default all; NotFoundError for one that does not exist."""
    if wanted is None:
        return list(existing)
    names = list(dict.fromkeys(wanted))
    for name in names:
        if name not in existing:
            raise NotFoundError(no_such(what, name, existing))
    return names


@contextmanager
def told_if_gone(where: str, what: str) -> Iterator[None]:
    """Raise ConflictError for a name that was there when a copy began, and is not any more.

    What is not found with a path, such as a whole bucket, is no name.
    """
    try:
        yield
    except NotFoundError as error:
        if error.path is not None:
            raise
        raise ConflictError(
            f"{where}: {what}, or a commit of it, went while the store was copied; run the "
            "same command again: it goes on with what is there now"
        ) from error


def _copy_line(source: Source, target: Store, branch: str, tally: Tally | None) -> None:
    """Copy the commits that a branch retains, oldest first."""
    row = source.index.read(lambda tables: tables.get("branches", branch))
    for commit in row["retained"] if row is not None else ():
        copy_commit(source, target, commit, branch, tally=tally)


def _check_part_of(source: Source, target: Store) -> None:
    """Refuse a target that holds another run: a clone is a new store."""
    heads = source.branches()
    for name, commit in target.branches().items():
        head = heads.get(name)
        if head is None or not lineage(source, head.id, [commit.id]).reached:
            raise ConflictError(
                f"{target.root}: a store with step {commit.step} on branch {name!r}, which "
                f"{source.root} does not know, is here already; clone to another path, or use "
                "`shardb push`"
            )
