"""Is a recovered store one that its workload may have left behind?

Owns the four questions: the state is a commit that was made; it is not below the last one reported
durable; every shard of it is there, of one step and with the right bytes; snapshots are
byte-identical. The store is read through its public interface alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

import shardb
from shardb.errors import FormatError, NotFoundError, ShardbError
from shardb.filesystem import DIRECT, RealFileSystem
from shardb.testing.model import Expectation, ModelCommit, ModelStore

# Returns what is wrong with the closed store at a path.
Audit = Callable[[str], list[str]]


class QuickFileSystem(RealFileSystem):
    """Real files on a RAM disk that stand for a disk: nothing needs a sync."""

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        return super().open(path, flags & ~DIRECT, mode)

    def fsync(self, file: int) -> None:
        pass

    def fdatasync(self, file: int) -> None:
        pass

    def sync_directory(self, path: str) -> None:
        pass

    def kind(self, path: str) -> str:
        return "disk" if super().exists(path) else super().kind(path)


def no_audit(_: str) -> list[str]:
    """Nothing beyond the oracle."""
    return []


def check(
    path: str, expectation: Expectation, *, audit: Audit = no_audit, go_on: bool = False
) -> list[str]:
    """Open the store at `path` and say what is wrong with it; empty when nothing is.

    With `go_on` a further commit is made, and the store opened again: recovery must leave a store
    that can be used.
    """
    files = QuickFileSystem()
    try:
        store = shardb.open(path, files=files)
    except (NotFoundError, FormatError) as error:
        if not expectation.may_be_absent:
            return [f"the store is gone: {error}"]
        return _create_again(path, files)
    except ShardbError as error:
        return [f"opening was refused ({error.kind}): {error}"]
    with store:
        wrong = _compare(store, expectation)
    wrong += audit(path)
    if go_on and not wrong:
        wrong += _go_on(path, files)
    return wrong


def observe(store: shardb.Store) -> ModelStore:
    """Read everything that the store holds: retained commits by branch, heads last; snapshots."""
    branches: dict[str, tuple[ModelCommit, ...]] = {}
    known: dict[str, ModelCommit] = {}
    for commit in store.commits():
        known[commit.id] = observe_commit(store, commit)
        branches[commit.branch] = (*branches.get(commit.branch, ()), known[commit.id])
    heads = {name: known[commit.id] for name, commit in store.branches().items()}
    for name, head in heads.items():
        before = [c for c in branches.get(name, ()) if c is not head]
        branches[name] = (*before, head)
    snapshots = {name: known[commit.id] for name, commit in store.snapshots().items()}
    return ModelStore(branches=branches, snapshots=snapshots)


def observe_commit(store: shardb.Store, commit: shardb.Commit) -> ModelCommit:
    """Read one commit as the model has it."""
    with store.at(commit=commit.id) as view:
        shards = {}
        for name in view.names():
            shard = view.read(name)
            shards[name] = {tensor: shard.raw(tensor).tobytes() for tensor in shard.specs}
    written = {name: entry.step for name, entry in commit.shards.items()}
    return ModelCommit(step=commit.step, shards=shards, written=written, state=dict(commit.state))


def _compare(store: shardb.Store, expectation: Expectation) -> list[str]:
    try:
        found = observe(store)
    except ShardbError as error:
        return [f"reading was refused ({error.kind}): {error}"]
    reasons = [_difference(found, state) for state in expectation.allowed()]
    if None in reasons:
        return []
    return [f"no allowed state: {'; or '.join(reason for reason in reasons if reason)}"]


def _difference(found: ModelStore, allowed: ModelStore) -> str | None:
    """How the found state differs from an allowed one; None when it does not."""
    heads, allowed_heads = found.heads(), allowed.heads()
    if {n: c.step for n, c in heads.items()} != {n: c.step for n, c in allowed_heads.items()}:
        steps = {n: c.step for n, c in allowed_heads.items()}
        return f"branches are at { {n: c.step for n, c in heads.items()} }, not at {steps}"
    for name, head in heads.items():
        if head != allowed_heads[name]:
            return f"branch {name!r}, step {head.step}: {_unlike(head, allowed_heads[name])}"
    if set(found.snapshots) != set(allowed.snapshots):
        return f"snapshots are {sorted(found.snapshots)}, not {sorted(allowed.snapshots)}"
    for name, commit in found.snapshots.items():
        if commit != allowed.snapshots[name]:
            return f"snapshot {name!r}: {_unlike(commit, allowed.snapshots[name])}"
    for commits in found.branches.values():
        for commit in commits:
            if not allowed.made(commit):
                return f"a commit of step {commit.step} is retained that was never made"
    return None


def _unlike(found: ModelCommit, expected: ModelCommit) -> str:
    if set(found.shards) != set(expected.shards):
        return f"shards {sorted(set(found.shards) ^ set(expected.shards))} are missing or extra"
    wrong = [n for n, tensors in found.shards.items() if tensors != expected.shards[n]]
    if wrong:
        return f"wrong bytes in {wrong}"
    return f"wrong step of a shard or wrong state: {found.written}, {found.state}"


def _create_again(path: str, files: RealFileSystem) -> list[str]:
    """A creation that was cut short can be done again."""
    try:
        with shardb.open(path, create=True, files=files) as store:
            return [f"a new store has branches {store.branches()}"] if store.branches() else []
    except ShardbError as error:
        return [f"creation cannot be repeated ({error.kind}): {error}"]


def _go_on(path: str, files: RealFileSystem) -> list[str]:
    """Make the next commit and see it again after reopening."""
    try:
        with shardb.open(path, files=files) as store, store.begin() as transaction:
            base = transaction.base
            for name, entry in dict(base.shards if base else {}).items():
                if entry.trainable:
                    transaction.write(name, transaction.read(name).arrays())
            if base is None:
                transaction.write("params/first", {"w": np.arange(4, dtype=np.float32)})
            made = transaction.commit(step=base.step + 1 if base else 0, state={"next": True})
            expected = observe_commit(store, made)
        with shardb.open(path, files=files) as store:
            if observe_commit(store, store.resolve("main")) != expected:
                return ["the next commit reads differently after reopening"]
    except ShardbError as error:
        return [f"the store cannot go on ({error.kind}): {error}"]
    return []


def index_path(path: str) -> str:
    """Where the data file of a store's index lies."""
    return os.path.join(path, "index", "data.mdb")
