"""Two pushers that move the same remote branch at the same moment, in processes of their own."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import shardb
from shardb import branching
from shardb.errors import ConflictError
from shardb.records import Commit
from shardb.remote.push import push_commit
from shardb.remote.repository import Head, RemoteStore
from shardb.remote.urls import open_remote
from shardb.transfer import clone
from tests.support.transfer_stores import commit

WAIT_SECONDS = 60


@dataclass(frozen=True, kw_only=True)
class Push:
    """What one pusher did in one round."""

    branch: str
    commit: str
    moved: bool


def branch_of_round(number: int) -> str:
    return f"race-{number}"


def race(root: Path, url: str, rounds: int, *, conditional: bool = True) -> list[Push]:
    """Let two processes push different steps of one line, round by round; what each was told.

    In every second round the branch is there before. Without `conditional` the pushers write over
    whatever they find: the control arm.
    """
    with shardb.open(root / "base", create=True) as base:
        first = commit(base, 0, size=2000)
        for name in ("one", "two"):
            with shardb.open(root / name, create=True) as store:
                clone(base, store)
        remote = open_remote(url, create=True)
        for number in range(0, rounds, 2):
            push_commit(base, remote, first.id, branch_of_round(number))
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    pushers = [
        context.Process(
            target=_push, args=(root / name, url, rounds, barrier, results, conditional)
        )
        for name in ("one", "two")
    ]
    for pusher in pushers:
        pusher.start()
    told = [results.get(timeout=WAIT_SECONDS) for _ in range(2 * rounds)]
    for pusher in pushers:
        pusher.join(WAIT_SECONDS)
        assert pusher.exitcode == 0
    return told


def _push(
    path: Path, url: str, rounds: int, barrier: Barrier, results: Any, conditional: bool
) -> None:
    plain = RemoteStore.move_branch

    def move(self: RemoteStore, branch: str, head: Head | None, to: Commit) -> bool:
        barrier.wait(WAIT_SECONDS)
        if conditional:
            return plain(self, branch, head, to)
        from shardb.remote import layout

        value = layout.encode_ref(to)
        self.bucket.upload(layout.ref_key(layout.BRANCHES, branch), len(value), iter([value]))
        return True

    with shardb.open(path) as store:
        remote = open_remote(url)
        for number in range(rounds):
            branch = branch_of_round(number)
            branching.create_branch(store, branch, "main")
            made = commit(store, 1, branch=branch, seed=hash(path.name) % 1000, size=2000)
            RemoteStore.move_branch = move  # type: ignore[method-assign]
            try:
                push_commit(store, remote, branch)
                moved = True
            except ConflictError:
                moved = False
            RemoteStore.move_branch = plain  # type: ignore[method-assign]
            results.put(Push(branch=branch, commit=made.id, moved=moved))


def lost(told: list[Push], heads: dict[str, str]) -> list[Push]:
    """Pushes that were told to have moved a branch, and are not where it is."""
    return [push for push in told if push.moved and heads[push.branch] != push.commit]
