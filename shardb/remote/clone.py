"""Cloning a whole store to object storage, and from it.

Owns the order: snapshots first, oldest first, then branches, so that every record only tells the
steps since the one before it. What is interrupted is gone on with by the same call.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardb import branching
from shardb.errors import ConflictError
from shardb.remote.pull import RemoteSource, pull_commit, pull_snapshot
from shardb.remote.push import push_commit, push_snapshot
from shardb.remote.repository import RemoteStore
from shardb.store import Store
from shardb.transfer import Cloned, Source, chosen, told_if_gone
from shardb.transfer_lineage import lineage
from shardb.transfer_tally import Tally


def clone_to(
    source: Source,
    remote: RemoteStore,
    *,
    branches: Iterable[str] | None = None,
    snapshots: Iterable[str] | None = None,
    tally: Tally | None = None,
) -> Cloned:
    """Push branches (all, or those named), snapshots likewise, and the retention policy.

    Raises NotFoundError for unknown names, ConflictError when the place holds another run, and when
    a name is removed before it was copied.
    """
    heads, pinned = source.branches(), source.snapshots()
    wanted_branches = chosen("branch", branches, heads)
    wanted_snapshots = chosen("snapshot", snapshots, pinned)
    for name, ref in remote.branches().items():
        head = heads.get(name)
        if head is None or lineage(source, head.id, [ref.commit]).reached is None:
            raise ConflictError(_taken(remote.url, name, ref.step, source.root))
    remote.set_policy(branching.policy_of(source))
    oldest_first = sorted(wanted_snapshots, key=lambda name: pinned[name].step)
    with told_if_gone(source.root, "a branch or a snapshot"):
        return Cloned(
            snapshots={n: push_snapshot(source, remote, n, tally=tally) for n in oldest_first},
            branches={n: push_commit(source, remote, n, n, tally=tally) for n in wanted_branches},
        )


def clone_from(
    remote: RemoteStore,
    target: Store,
    *,
    branches: Iterable[str] | None = None,
    snapshots: Iterable[str] | None = None,
    tally: Tally | None = None,
) -> Cloned:
    """Pull branches (all, or those named), snapshots likewise, and the retention policy.

    `target` is a new store, or one that an interrupted clone left. Errors as in `clone_to`.
    """
    heads, pinned = remote.branches(), remote.snapshots()
    wanted_branches = chosen("branch", branches, heads)
    wanted_snapshots = chosen("snapshot", snapshots, pinned)
    history = RemoteSource(remote)
    for name, commit in target.branches().items():
        head = heads.get(name)
        if head is None or history.lineage(head.commit, [commit.id]).reached is None:
            raise ConflictError(_taken(target.root, name, commit.step, remote.url))
    policy = remote.policy()
    if policy is not None and policy != branching.policy_of(target):
        branching.set_policy(target, policy)
    with told_if_gone(remote.url, "a branch or a snapshot"):
        return Cloned(
            branches={
                name: pull_commit(remote, target, heads[name].commit, name, tally=tally)
                for name in wanted_branches
            },
            snapshots={
                name: pull_snapshot(remote, target, name, tally=tally) for name in wanted_snapshots
            },
        )


def _taken(where: str, branch: str, step: int, source: str) -> str:
    return (
        f"{where}: a store with step {step} on branch {branch!r}, which {source} does not know, is "
        "here already; clone to another place, or use `shardb push`"
    )
