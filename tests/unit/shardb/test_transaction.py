"""Is a transaction all or nothing, and does it read what it wrote?"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardb
from shardb.errors import (
    CommitUnknownError,
    ConflictError,
    IncompleteCommitError,
    NotFoundError,
    StorageFailedError,
    StorageFullError,
    UsageError,
)
from shardb.layout import TensorSpec
from tests.support.stores import (
    MEDIA,
    InterposedFiles,
    Medium,
    commit_step,
    filled,
    value_of,
    values_of,
)

SPECS = {"weight": TensorSpec(dtype="F32", shape=(8, 8))}


def write_and_commit(transaction: shardb.Transaction, step: int) -> None:
    for name in ("params/a", "params/b"):
        transaction.write(name, filled(step))
    transaction.commit(step=step)


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
    with store.begin() as transaction, pytest.raises(IncompleteCommitError, match=r"p/4, …\)"):
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


def test_are_the_fields_of_a_commit_those_that_are_read_back(store: shardb.Store) -> None:
    """The mapping given may change afterwards; the commit does not."""
    state: dict[str, Any] = {"pair": (1, 2), "nested": {"list": [1]}}
    commit = commit_step(store, 1, state=state)
    state["nested"]["list"].append(2)
    assert commit.state == store.resolve().state == {"pair": [1, 2], "nested": {"list": [1]}}


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


def test_are_equal_shards_of_one_commit_stored_once(store: shardb.Store, root: Path) -> None:
    with store.begin() as transaction:
        for name in ("a", "b", "c"):
            transaction.write(name, filled(1))
        commit = transaction.commit(step=1)
    assert len({entry.digest for entry in commit.shards.values()}) == 1
    assert len(names_in(root, "objects")) == 1
    for step in (2, 3, 4, 5):
        with store.begin() as transaction:
            for number, name in enumerate("abc"):
                transaction.write(name, filled(step if number < 2 else 1))
            transaction.commit(step=step)
        with store.at() as view:
            assert values_of(view) == {"a": step, "b": step, "c": 1.0}


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


def test_is_the_queue_of_writes_bounded(root: Path) -> None:
    """Back-pressure: the caller waits; nothing grows."""
    release, waiting = threading.Event(), []

    def slow(*_: object, **__: object) -> None:
        release.wait(10)

    files = InterposedFiles("pwrite", lambda *_: None)
    options: dict[str, Any] = {"max_pending_writes": 2, "writer_threads": 1}
    with (
        shardb.open(root, create=True, files=files, **options) as store,
        store.begin() as transaction,
    ):
        files.before = slow

        def stage_all() -> None:
            for number in range(5):
                transaction.write(f"a{number}", filled(number))
                waiting.append(store.writer.pending)

        thread = threading.Thread(target=stage_all)
        thread.start()
        thread.join(timeout=0.3)
        assert thread.is_alive()
        assert waiting == [1, 2]
        release.set()
        thread.join()
        assert max(waiting) <= 2
        transaction.commit(step=1)


def test_is_the_branch_refused_to_a_second_transaction(store: shardb.Store) -> None:
    with store.begin(), pytest.raises(ConflictError, match="open transaction"):
        store.begin()
    with store.begin() as transaction:
        assert transaction.branch == "main"


@pytest.mark.parametrize("operation", ["pwrite", "allocate"])
def test_is_a_full_disk_told_with_bytes_and_the_previous_commit_intact(
    root: Path, operation: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    medium = "memory:tmpfs" if operation == "allocate" else "disk"
    files = InterposedFiles(operation, lambda *_, **__: None, medium=medium)
    with shardb.open(root, create=True, files=files) as store:
        commit_step(store, 1)
        transaction = store.begin()
        files.before = full
        with pytest.raises(StorageFullError, match=r"\d+ bytes are needed, \d+ bytes are free"):
            write_and_commit(transaction, 2)
        files.before = lambda *_, **__: None
        transaction.abort()
        with store.at() as view:
            assert values_of(view) == {"params/a": 1.0, "params/b": 1.25}
        commit_step(store, 2)
        with store.at() as view:
            assert view.commit.step == 2


class FailingLog(Medium):
    """A medium whose log fails: at the write, so that nothing lands, or only at the sync."""

    def __init__(self, name: str, operation: str, error: int) -> None:
        super().__init__(name)
        self.failing = False
        self._operation = operation
        self._error = error
        self._log_files: set[int] = set()

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        file = super().open(path, flags, mode)
        (self._log_files.add if path.endswith(".wal") else self._log_files.discard)(file)
        return file

    def _fail(self, operation: str, file: int) -> None:
        if self.failing and operation == self._operation and file in self._log_files:
            raise OSError(self._error, os.strerror(self._error))

    def pwrite(self, file: int, data: Any, offset: int) -> int:
        self._fail("pwrite", file)
        return super().pwrite(file, data, offset)

    def fdatasync(self, file: int) -> None:
        self._fail("fdatasync", file)
        super().fdatasync(file)


@pytest.mark.parametrize("medium_name", MEDIA)
def test_does_a_full_log_give_back_what_was_placed(root: Path, medium_name: str) -> None:
    files = FailingLog(medium_name, "pwrite", errno.ENOSPC)
    with shardb.open(root, create=True, files=files) as store:
        commit_step(store, 1)
        before = names_in(root, "objects")
        for _ in range(3):
            transaction = store.begin()
            files.failing = True
            with pytest.raises(StorageFullError, match="while writing the log"):
                write_and_commit(transaction, 2)
            files.failing = False
            assert names_in(root, "objects") == before
        assert len(names_in(root, "spare")) <= 3
        for step in (2, 3, 4, 5):
            commit_step(store, step)
            with store.at() as view:
                assert values_of(view) == {"params/a": step, "params/b": step + 0.25}


@pytest.mark.parametrize("medium_name", MEDIA)
def test_is_an_unknown_commit_told_and_found_when_it_landed(root: Path, medium_name: str) -> None:
    files = FailingLog(medium_name, "fdatasync", errno.EIO)
    with shardb.open(root, create=True, files=files) as store:
        commit_step(store, 1)
        transaction = store.begin()
        files.failing = True
        with pytest.raises(CommitUnknownError) as caught:
            write_and_commit(transaction, 2)
        assert not caught.value.definite
        assert caught.value.exit_code == 7
        with pytest.raises(StorageFailedError, match="open it again"):
            store.begin()
        with store.at() as view:
            assert values_of(view) == {"params/a": 1.0, "params/b": 1.25}
    files.failing = False
    with shardb.open(root, files=files) as store:
        assert store.resolve(caught.value.commit_id).step == 2
        with store.at() as view:
            assert values_of(view) == {"params/a": 2.0, "params/b": 2.0}
