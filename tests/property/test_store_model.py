"""Does a store answer as a plain dictionary would, whatever is done to it in whatever order?

The machine begins, stages, writes, discards, commits, aborts, snapshots, rewinds, deletes, closes
and opens again, without its index or with an old one, while views of this store and of a second one
are held. The model is a dictionary. Profiles: `default` for every run, `ci` for a long one, chosen
by SHARDB_PROPERTY_PROFILE.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import shardb
from shardb import branching
from shardb.errors import ConflictError, IncompleteCommitError, UsageError
from tests.support.stores import MEDIA, Medium, copied, filled, value_of, values_of

PROFILES = {
    "default": settings(max_examples=60, stateful_step_count=40),
    "ci": settings(max_examples=600, stateful_step_count=80),
}
PROFILE = settings(
    PROFILES[os.environ.get("SHARDB_PROPERTY_PROFILE", "default")],
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
RETAINED = 2

branches = st.sampled_from(["main", "side", "side.b"])
shards = st.sampled_from(["params/a", "params/b", "optim/a"])
# Few values, so that objects come back that were retired long ago.
values = st.integers(0, 3)


@dataclass(frozen=True)
class ModelCommit:
    """A commit of the model: its step, and what fills each shard."""

    step: int
    shards: dict[str, float]


@dataclass
class Model:
    """What a store should say."""

    retained: dict[str, list[ModelCommit]] = field(default_factory=dict)
    abandoned: list[ModelCommit] = field(default_factory=list)
    snapshots: dict[str, ModelCommit] = field(default_factory=dict)
    staged: dict[str, dict[str, float]] = field(default_factory=dict)

    def head(self, branch: str) -> ModelCommit | None:
        return self.retained[branch][-1] if branch in self.retained else None

    def commits(self) -> list[ModelCommit]:
        line = [commit for kept in self.retained.values() for commit in kept]
        return [*line, *self.snapshots.values(), *self.abandoned]


class StoreMachine(RuleBasedStateMachine):
    """One store, maybe a second handle of it, and the model."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="shardb-model-", dir=MEMORY))
        self.root = self.folder / "run"
        self.model = Model()
        self.transactions: dict[str, shardb.Transaction] = {}
        self.views: list[tuple[shardb.ReadView, ModelCommit, shardb.Store]] = []
        self.reader: shardb.Store | None = None
        self.old_index: Path | None = None
        self.step = 0
        self.begun = False  # a store that was never written to has no index to lose

    @initialize(medium=st.sampled_from(MEDIA), cache_bytes=st.sampled_from([0, 9000, 1 << 30]))
    def make(self, medium: str, cache_bytes: int) -> None:
        self.options: dict[str, Any] = {"files": Medium(medium), "cache_bytes": cache_bytes}
        self.store = shardb.open(self.root, create=True, **self.options)

    # Writing

    @rule(branch=branches)
    def begin(self, branch: str) -> None:
        if branch in self.transactions:
            with pytest.raises(ConflictError):
                self.store.begin(branch)
            return
        self.transactions[branch] = self.store.begin(branch)
        self.begun = True
        self.model.staged[branch] = {}

    @precondition(lambda self: self.transactions)
    @rule(data=st.data(), shard=shards, value=values, how=st.sampled_from(["write", "stage"]))
    def write(self, data: st.DataObject, shard: str, value: int, how: str) -> None:
        branch = data.draw(st.sampled_from(sorted(self.transactions)))
        transaction, staged = self.transactions[branch], self.model.staged[branch]
        if shard in staged:
            with pytest.raises(UsageError):
                transaction.write(shard, filled(value))
            return
        if how == "write":
            transaction.write(shard, filled(value))
        else:
            image = transaction.stage(shard, shardb_specs())
            for name, array in filled(value).items():
                image.array(name)[...] = array
            image.seal()
        staged[shard] = float(value)

    @precondition(lambda self: any(self.model.staged.values()))
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        branch = data.draw(st.sampled_from(sorted(b for b, s in self.model.staged.items() if s)))
        shard = data.draw(st.sampled_from(sorted(self.model.staged[branch])))
        self.transactions[branch].discard(shard)
        del self.model.staged[branch][shard]

    @precondition(lambda self: self.transactions)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        branch = data.draw(st.sampled_from(sorted(self.transactions)))
        transaction, staged = self.transactions[branch], self.model.staged[branch]
        head = self.model.head(branch)
        if not staged or (head is not None and set(head.shards) - set(staged)):
            with pytest.raises(IncompleteCommitError):
                transaction.commit(step=self.step + 1)
            return
        self.commit_staged(branch)

    @rule(branch=branches, value=values)
    def whole_step(self, branch: str, value: int) -> None:
        """Begin, write every shard that is not staged, commit: most of what a run does."""
        if branch not in self.transactions:
            self.begin(branch)
        head = self.model.head(branch)
        for shard in sorted(head.shards) if head else ["params/a"]:
            if shard not in self.model.staged[branch]:
                self.transactions[branch].write(shard, filled(value))
                self.model.staged[branch][shard] = float(value)
        self.commit_staged(branch)

    def commit_staged(self, branch: str) -> None:
        transaction, staged = self.transactions[branch], self.model.staged[branch]
        self.step += 1
        made = transaction.commit(step=self.step, metrics={"step": self.step})
        assert made.metrics == {"step": self.step}
        del self.transactions[branch], self.model.staged[branch]
        kept = [*self.model.retained.get(branch, []), ModelCommit(self.step, dict(staged))]
        self.model.retained[branch] = kept[-RETAINED:]

    @precondition(lambda self: self.transactions)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        branch = data.draw(st.sampled_from(sorted(self.transactions)))
        self.transactions.pop(branch).abort()
        del self.model.staged[branch]

    # Names

    @precondition(lambda self: self.model.retained)
    @rule(data=st.data(), name=st.sampled_from(["x", "y"]))
    def snapshot(self, data: st.DataObject, name: str) -> None:
        branch = data.draw(st.sampled_from(sorted(self.model.retained)))
        commit, existing = self.model.retained[branch][-1], self.model.snapshots.get(name)
        if existing is not None and existing != commit:
            with pytest.raises(ConflictError):
                self.store.create_snapshot(name, branch)
            return
        assert self.store.create_snapshot(name, branch).step == commit.step
        self.model.snapshots[name] = commit

    @precondition(lambda self: self.model.snapshots)
    @rule(data=st.data())
    def delete_snapshot(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model.snapshots)))
        branching.delete_snapshot(self.store, name)
        del self.model.snapshots[name]

    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        able = [
            branch
            for branch, kept in sorted(self.model.retained.items())
            if len(kept) > 1 and branch not in self.transactions
        ]
        if not able:
            return
        branch = data.draw(st.sampled_from(able))
        before, last = self.model.retained[branch]
        branching.rewind(self.store, branch, f"step-{before.step}")
        self.model.retained[branch] = [before]
        self.model.abandoned.append(last)

    # Reading

    @precondition(lambda self: self.model.commits())
    @rule(data=st.data(), second=st.booleans())
    def hold(self, data: st.DataObject, second: bool) -> None:
        commit = data.draw(st.sampled_from(self.model.commits()))
        store = self.reader if second and self.reader is not None else self.store
        named = next(c.id for c in store.commits() if c.step == commit.step)
        self.views.append((store.at(commit=named), commit, store))

    @precondition(lambda self: self.views)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.views) - 1))
        self.views.pop(number)[0].close()

    @rule()
    def second_store(self) -> None:
        if self.reader is None:
            self.reader = shardb.open(self.root, **self.options)
        else:
            self.close_store(self.reader)
            self.reader = None

    # Opening again

    @rule(what=st.sampled_from(["nothing", "lose index", "old index", "keep index"]))
    def reopen(self, what: str) -> None:
        self.close_all()
        if what == "lose index":
            shutil.rmtree(self.root / "index")
        elif what == "old index" and self.old_index is not None:
            shutil.rmtree(self.root / "index")
            copied(self.old_index, self.root / "index")
        elif what == "keep index":
            self.old_index = self.folder / f"index-{self.step}-{len(list(self.folder.iterdir()))}"
            copied(self.root / "index", self.old_index)
        self.store = shardb.open(self.root, **self.options)
        assert self.store.recovery.dropped == []
        rebuilt = [entry["what"] for entry in self.store.recovery.rebuilt]
        assert ("index" in rebuilt) == (what == "lose index" and self.begun), rebuilt

    @rule()
    def rotate(self) -> None:
        """The next record begins a new segment of the log."""
        self.store.appender._segment_limit_bytes = 1

    def close_all(self) -> None:
        for store in (self.reader, self.store):
            if store is not None:
                self.close_store(store)
        self.reader = None
        self.transactions, self.model.staged = {}, {}

    def close_store(self, store: shardb.Store) -> None:
        """Its views are over with it."""
        store.close()
        for view, commit, owner in self.views:
            if owner is store:
                with pytest.raises(UsageError, match="closed"):
                    view.read(min(commit.shards))
        self.views = [held for held in self.views if held[2] is not store]

    # What must hold after every rule

    @invariant()
    def says_what_the_model_says(self) -> None:
        if not hasattr(self, "store"):
            return
        for store in (self.store, self.reader):
            if store is None:
                continue
            heads = {name: commit.step for name, commit in store.branches().items()}
            assert heads == {name: kept[-1].step for name, kept in self.model.retained.items()}
            found = {name: commit.step for name, commit in store.snapshots().items()}
            assert found == {name: commit.step for name, commit in self.model.snapshots.items()}
            steps = sorted(commit.step for commit in store.commits())
            assert steps == sorted({commit.step for commit in self.model.commits()})

    @invariant()
    def gives_what_was_committed(self) -> None:
        if not hasattr(self, "store"):
            return
        expected = {commit.step: commit.shards for commit in self.model.commits()}
        for commit in self.store.commits():
            assert commit.step in expected
            with self.store.at(commit=commit.id) as view:
                assert values_of(view) == expected[commit.step]
        for view, commit, _ in self.views:
            assert values_of(view) == commit.shards
        for branch, transaction in self.transactions.items():
            head = self.model.head(branch)
            for name in transaction.names():
                base = head.shards.get(name) if head else None
                assert value_of(transaction.read(name)) == self.model.staged[branch].get(name, base)

    @invariant()
    def keeps_no_more_than_it_must(self) -> None:
        if not hasattr(self, "store") or self.views or self.transactions:
            return
        leased = self.store.leases.leased_commits()
        assert leased == set()

    def teardown(self) -> None:
        try:
            if hasattr(self, "store"):
                self.close_all()
        finally:  # a machine that found a fault, as the control arm does, ends here by an error
            shutil.rmtree(self.folder)


def shardb_specs() -> dict[str, shardb.TensorSpec]:
    return {
        "weight": shardb.TensorSpec(dtype="F32", shape=(8, 8)),
        "count": shardb.TensorSpec(dtype="I64", shape=(1,)),
    }


def check_machine() -> None:
    run_state_machine_as_test(StoreMachine, settings=PROFILE)


def test_does_a_store_answer_as_a_dictionary_would() -> None:
    check_machine()


class ForgetfulMachine(StoreMachine):
    """The control arm: a model in which a commit replaces what it should keep beside it."""

    @precondition(lambda self: any(len(kept) > 1 for kept in self.model.retained.values()))
    @rule()
    def forget(self) -> None:
        for branch, kept in self.model.retained.items():
            self.model.retained[branch] = kept[-1:]


def test_would_a_forgotten_commit_be_noticed() -> None:
    found = settings(PROFILE, phases=[Phase.generate], derandomize=True, database=None)
    with pytest.raises((AssertionError, ExceptionGroup)):
        run_state_machine_as_test(ForgetfulMachine, settings=found)
