"""Is every commit refused that would be wrong, before anything changes?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardb
from shardb.errors import (
    ConflictError,
    IncompleteCommitError,
    NotFoundError,
    UsageError,
)
from shardb.layout import TensorSpec
from tests.support.stores import (
    commit_step,
    filled,
)

SPECS = {"weight": TensorSpec(dtype="F32", shape=(8, 8))}


def names_in(root: Path, folder: str) -> list[str]:
    return sorted(os.listdir(root / folder))


@pytest.mark.parametrize("ended", ["commit", "abort"])
def test_is_an_ended_transaction_over(store: shardb.Store, ended: str) -> None:
    transaction = store.begin()
    transaction.write("a", filled(1))
    if ended == "commit":
        transaction.commit(step=1)
    else:
        transaction.abort()
    uses: list[Any] = [
        lambda: transaction.read("a"),
        lambda: transaction.stage("b", SPECS),
        lambda: transaction.write("b", filled(1)),
        lambda: transaction.discard("a"),
        lambda: transaction.commit(step=2),
    ]
    for use in uses:
        with pytest.raises(UsageError, match="over"):
            use()


def test_is_a_commit_without_a_trainable_shard_refused(store: shardb.Store) -> None:
    """It would mix two steps."""
    commit_step(store, 1)
    with store.begin() as transaction:
        transaction.write("params/a", filled(2))
        with pytest.raises(IncompleteCommitError, match=r"lacks 1 of 2 shards \(params/b\)"):
            transaction.commit(step=2)
        transaction.write("params/b", filled(2))
        assert transaction.commit(step=2).step == 2


def test_is_a_long_list_of_missing_shards_cut_short(store: shardb.Store) -> None:
    commit_step(store, 1, shards=tuple(f"p/{number}" for number in range(9)))
    left = r"p/3, p/4 and 4 more\)"
    with store.begin() as transaction, pytest.raises(IncompleteCommitError, match=left):
        transaction.commit(step=2)


def test_is_an_empty_first_commit_refused(store: shardb.Store) -> None:
    with store.begin() as transaction, pytest.raises(IncompleteCommitError, match="at least one"):
        transaction.commit(step=1)


@pytest.mark.parametrize("step", [5, 4, 0])
def test_is_a_step_that_goes_back_refused(store: shardb.Store, step: int) -> None:
    commit_step(store, 5)
    with pytest.raises(UsageError, match="not beyond step 5"):
        commit_step(store, step)
    assert store.resolve().step == 5


@pytest.mark.parametrize("step", [-1, 1.5, "1", None, True, np.int64(3), 1 << 63])
def test_is_a_step_that_is_no_whole_number_refused(store: shardb.Store, step: Any) -> None:
    with store.begin() as transaction:
        transaction.write("a", filled(1))
        with pytest.raises(UsageError, match="whole number"):
            transaction.commit(step=step)


@pytest.mark.parametrize("field", ["state", "metrics", "statistics"])
def test_is_a_field_that_cannot_be_stored_refused_before_anything_is_written(
    store: shardb.Store, root: Path, field: str
) -> None:
    with store.begin() as transaction:
        transaction.write("a", filled(1))
        with pytest.raises(UsageError, match=field):
            transaction.commit(step=1, **{field: {"x": np.float32(1)}})
        assert names_in(root, "objects") == []
        assert transaction.commit(step=1).step == 1


def test_is_a_recipe_that_is_no_text_refused(store: shardb.Store) -> None:
    with store.begin() as transaction:
        transaction.write("a", filled(1))
        with pytest.raises(UsageError, match="recipe_digest"):
            transaction.commit(step=1, recipe_digest=5)  # type: ignore[arg-type]


def test_is_a_shard_staged_twice_refused(store: shardb.Store) -> None:
    with store.begin() as transaction:
        transaction.write("a", filled(1))
        with pytest.raises(UsageError, match="staged already"):
            transaction.write("a", filled(2))


@pytest.mark.parametrize("name", ["", "../a", "a b", "/a"])
def test_is_a_bad_shard_name_refused(store: shardb.Store, name: str) -> None:
    with store.begin() as transaction, pytest.raises(UsageError, match="not a valid name"):
        transaction.write(name, filled(1))


def test_is_what_is_not_there_named(store: shardb.Store) -> None:
    with store.begin() as transaction:
        with pytest.raises(NotFoundError, match="no shard 'a'"):
            transaction.read("a")
        with pytest.raises(NotFoundError, match="'a' is not staged"):
            transaction.discard("a")


def test_does_a_failed_copy_leave_nothing_staged(store: shardb.Store) -> None:
    class Broken(np.ndarray):
        def __array_function__(self, *_: object) -> None:
            raise RuntimeError("broken")

    with store.begin() as transaction:
        with pytest.raises(RuntimeError, match="broken"):
            transaction.write("a", {"x": np.zeros(4).view(Broken)})
        assert transaction.names() == []
        transaction.write("a", filled(1))
        transaction.commit(step=1)


def test_is_the_branch_refused_to_a_second_transaction(store: shardb.Store) -> None:
    with store.begin(), pytest.raises(ConflictError, match="open transaction"):
        store.begin()
    with store.begin() as transaction:
        assert transaction.branch == "main"
