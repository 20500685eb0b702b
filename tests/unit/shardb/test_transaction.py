"""Is a transaction all or nothing, and does it read what it wrote?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardb
from shardb.errors import (
    UsageError,
)
from shardb.layout import TensorSpec
from tests.support.stores import (
    commit_step,
    filled,
    value_of,
    values_of,
)

SPECS = {"weight": TensorSpec(dtype="F32", shape=(8, 8))}


def names_in(root: Path, folder: str) -> list[str]:
    return sorted(os.listdir(root / folder))


def test_is_a_commit_what_was_staged(store: shardb.Store) -> None:
    with store.begin() as transaction:
        assert transaction.base is None
        assert transaction.names() == []
        transaction.write("params/a", filled(1))
        transaction.write("meta/recipe", filled(7), trainable=False)
        assert transaction.names() == ["meta/recipe", "params/a"]
        commit = transaction.commit(
            step=3,
            state={"seed": 5},
            metrics={"loss": 0.5},
            statistics={"params/a": {"norm": 2.0}},
            recipe_digest="r",
        )
    assert (commit.branch, commit.step, commit.parent) == ("main", 3, None)
    assert list(commit.shards) == ["meta/recipe", "params/a"]
    assert [entry.step for entry in commit.shards.values()] == [3, 3]
    assert [entry.trainable for entry in commit.shards.values()] == [False, True]
    assert (commit.state, commit.metrics, commit.recipe) == ({"seed": 5}, {"loss": 0.5}, "r")
    assert commit.statistics == {"params/a": {"norm": 2.0}}
    assert store.resolve() == commit
    with store.at() as view:
        assert values_of(view) == {"meta/recipe": 7.0, "params/a": 1.0}


def test_is_a_frozen_shard_carried_over_with_the_step_that_wrote_it(store: shardb.Store) -> None:
    with store.begin() as transaction:
        transaction.write("params/a", filled(1))
        transaction.write("meta/recipe", filled(7), trainable=False)
        first = transaction.commit(step=1)
    with store.begin() as transaction:
        assert transaction.base == first
        transaction.write("params/a", filled(2))
        second = transaction.commit(step=2)
    assert second.parent == first.id
    assert second.shards["meta/recipe"] == first.shards["meta/recipe"]
    assert second.shards["params/a"].step == 2
    with store.at() as view:
        assert values_of(view) == {"meta/recipe": 7.0, "params/a": 2.0}


def test_are_own_writes_read_and_nobody_elses(store: shardb.Store) -> None:
    commit_step(store, 1)
    with store.begin() as transaction:
        assert value_of(transaction.read("params/a")) == 1.0
        transaction.write("params/a", filled(5))
        assert value_of(transaction.read("params/a")) == 5.0
        assert value_of(transaction.read("params/b")) == 1.25
        with store.at() as view:
            assert value_of(view.read("params/a")) == 1.0


def test_has_a_read_shard_the_digest_of_its_commit(store: shardb.Store) -> None:
    commit = commit_step(store, 1)
    with store.begin() as transaction:
        assert transaction.read("params/a").digest == commit.shards["params/a"].digest
        transaction.write("params/a", filled(1))
        transaction._staged["params/a"].written.result()  # type: ignore[union-attr]
        assert transaction.read("params/a").digest == commit.shards["params/a"].digest


def test_is_an_unsealed_shard_not_read(store: shardb.Store) -> None:
    with store.begin() as transaction:
        staged = transaction.stage("a", SPECS)
        with pytest.raises(UsageError, match="not sealed"):
            transaction.read("a")
        staged.array("weight")[:] = 1
        staged.seal()
        assert value_of(transaction.read("a")) == 1.0


def test_is_a_shard_staged_like_another(store: shardb.Store) -> None:
    commit_step(store, 1)
    with store.begin() as transaction:
        for name in ("params/a", "params/b"):
            staged = transaction.stage(name, like=transaction.read(name))
            assert dict(staged.specs) == dict(transaction.base.shards and staged.specs)
            staged.array("weight")[:] = 9
            staged.array("count")[:] = 9
        transaction.commit(step=2)
    with store.at() as view:
        assert values_of(view) == {"params/a": 9.0, "params/b": 9.0}


def test_does_commit_seal_what_was_not(store: shardb.Store) -> None:
    with store.begin() as transaction:
        transaction.stage("a", SPECS).array("weight")[:] = 4
        transaction.commit(step=1)
    with store.at() as view:
        assert values_of(view) == {"a": 4.0}


def test_can_a_shard_be_discarded_and_staged_again(store: shardb.Store) -> None:
    """Guarded replay: drop what is staged, stage again; only the last one is committed."""
    with store.begin() as transaction:
        for value in (1, 2, 3):
            if value > 1:
                transaction.discard("a")
                assert transaction.names() == []
            transaction.write("a", filled(value))
            assert value_of(transaction.read("a")) == value
        transaction.commit(step=1)
    with store.at() as view:
        assert values_of(view) == {"a": 3.0}


def test_does_a_view_outlive_its_discarded_shard(store: shardb.Store) -> None:
    with store.begin() as transaction:
        transaction.write("a", filled(1))
        view = transaction.read("a")
        transaction.discard("a")
        transaction.write("a", filled(2))
        transaction.write("b", filled(3))
        assert value_of(view) == 1.0


def test_is_nothing_visible_after_an_abort(store: shardb.Store, root: Path) -> None:
    commit_step(store, 1)
    before = names_in(root, "objects")
    with store.begin() as transaction:
        transaction.write("params/a", filled(2))
        transaction.abort()
        transaction.abort()
    assert names_in(root, "objects") == before
    assert store.resolve().step == 1
    commit_step(store, 2)


def test_does_leaving_the_block_abort(store: shardb.Store) -> None:

    def fail_inside() -> None:
        with store.begin() as transaction:
            transaction.write("a", filled(1))
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail_inside()
    assert store.branches() == {}
    with store.begin() as transaction:
        transaction.write("a", filled(2))
    assert store.branches() == {}


def test_are_the_fields_of_a_commit_those_that_are_read_back(store: shardb.Store) -> None:
    """The mapping given may change afterwards; the commit does not."""
    state: dict[str, Any] = {"pair": (1, 2), "nested": {"list": [1]}}
    commit = commit_step(store, 1, state=state)
    state["nested"]["list"].append(2)
    assert commit.state == store.resolve().state == {"pair": [1, 2], "nested": {"list": [1]}}


@pytest.mark.parametrize("order", ["C", "F", "strided", "reversed", "big-endian"])
def test_is_an_array_stored_in_c_order_whatever_its_own(store: shardb.Store, order: str) -> None:
    source = np.arange(24, dtype=np.float32).reshape(4, 6)
    array = {
        "C": source,
        "F": np.asfortranarray(source),
        "strided": np.repeat(source, 2, axis=1)[:, ::2],
        "reversed": source[::-1, ::-1].copy()[::-1, ::-1],
        "big-endian": source.astype(">f4"),
    }[order]
    with store.begin() as transaction:
        transaction.write("a", {"x": array})
        transaction.commit(step=1)
    with store.at() as view:
        read = view.read("a").array("x")
        assert read.tobytes() == source.tobytes()


def test_does_mutating_a_source_after_the_commit_change_nothing(
    store: shardb.Store, root: Path
) -> None:
    """The background writer must have no alias of live tensors, and neither must memory."""
    sources = filled(1)
    with store.begin() as transaction:
        transaction.write("params/a", sources)
        staged = transaction.stage("params/b", SPECS)
        kept = staged.array("weight")
        kept[:] = 2
        commit = transaction.commit(step=1)
    sources["weight"][:] = 99
    kept[:] = 99
    with store.at(commit=commit.id) as view:
        assert values_of(view) == {"params/a": 1.0, "params/b": 2.0}
    with shardb.open(root, cache_bytes=0) as other, other.at(commit=commit.id) as view:
        assert values_of(view) == {"params/a": 1.0, "params/b": 2.0}
    for step in (2, 3, 4, 5):
        commit_step(store, step)
        kept[:] = 98 + step
        with store.at() as view:
            assert values_of(view) == {"params/a": step, "params/b": step + 0.25}


def test_does_a_kept_array_not_become_the_memory_of_a_later_shard(store: shardb.Store) -> None:
    kept = []
    for step in range(1, 6):
        with store.begin() as transaction:
            staged = transaction.stage("a", SPECS)
            kept.append(staged.array("weight"))
            kept[-1][:] = step
            transaction.commit(step=step)
        del staged
    assert [float(array[0, 0]) for array in kept] == [1, 2, 3, 4, 5]
