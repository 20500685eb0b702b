"""Does a store that cannot be written give the same answers, and refuse what it must?"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest

import shardb
from shardb.branching import create_branch, policy_of
from shardb.errors import (
    ConflictError,
    FormatError,
    LogDamagedError,
    LogTruncatedError,
    NotFoundError,
    ObjectCorruptError,
    StorageFailedError,
)
from shardb.format import encode_format
from shardb.pack import pack_snapshots
from shardb.read_only import ReadOnlyStore, open_to_look
from shardb.store import Store
from shardb.transfer import copy_commit
from tests.support.read_only import RefusingFiles
from tests.support.small_stores import flip_bit
from tests.support.stores import InterposedFiles, commit_step, copied, last_segment, values_of


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 0 to 5 of two branches, two snapshots, one of them packed."""
    root = tmp_path_factory.mktemp("made") / "run"
    with shardb.open(root, create=True) as store:
        for step in range(6):
            commit_step(store, step, metrics={"loss": 1 / (step + 1)})
            if step in (1, 2):
                store.create_snapshot(f"step-{step}")
        create_branch(store, "side", "step-2")
        pack_snapshots(store, ["step-1"])
    return root


@pytest.fixture
def run(made: Path, root: Path) -> Path:
    return copied(made, root)


def looked_at(root: Path, code: int = errno.EROFS) -> ReadOnlyStore:
    """Only look at a store; nothing of it is changed."""
    files = RefusingFiles(code)
    store = open_to_look(str(root), files=files)
    assert isinstance(store, ReadOnlyStore)
    assert files.tried != [], "the control: a store that can be opened tries to write"
    return store


def answers(store: Store | ReadOnlyStore) -> dict[str, Any]:
    found: dict[str, Any] = {
        "branches": store.branches(),
        "snapshots": store.snapshots(),
        "commits": store.commits(),
        "durable": store.durable_step("side"),
        "policy": policy_of(store),
        "id": store.format.store_id,
    }
    for commit in store.commits():
        with store.at(commit=commit.id) as view:
            found[commit.id] = {n: view.read(n).array("weight")[0, 0] for n in view.names()}
    return found


def test_is_a_store_that_can_be_opened_opened(run: Path) -> None:
    with open_to_look(str(run)) as store:
        assert isinstance(store, Store)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC])
def test_are_the_answers_the_same(run: Path, code: int) -> None:
    with shardb.open(run) as store:
        expected = answers(store)
    with looked_at(run, code) as store:
        assert answers(store) == expected
        assert store.recovery.warnings[-1]["what"] in ("read only", "volatile medium")
        assert "read only" in [warning["what"] for warning in store.recovery.warnings]


@pytest.mark.parametrize("lost", ["index", "locks", "leases", "spare"])
def test_is_nothing_but_log_and_objects_needed(run: Path, lost: str) -> None:
    with shardb.open(run) as store:
        expected = answers(store)
    shutil.rmtree(run / lost)
    with looked_at(run) as store:
        assert answers(store) == expected
        assert (store.locks.writers(), store.leases.describe_all()) == ([], [])
    assert not (run / lost).exists()


def test_is_a_torn_end_left_out_and_left_there(run: Path) -> None:
    segment = last_segment(run)
    with segment.open("ab") as file:
        file.write(b"SDBW half a record")
    whole = segment.read_bytes()
    with looked_at(run) as store:
        assert store.resolve().step == 5
    assert segment.read_bytes() == whole


def test_is_an_older_index_caught_up_in_memory(run: Path) -> None:
    kept = (run / "index/data.mdb").read_bytes()
    with shardb.open(run) as store:
        commit_step(store, 6)
    (run / "index/data.mdb").write_bytes(kept)
    with looked_at(run) as store:
        assert store.resolve().step == 6
        with store.at() as view:
            assert values_of(view)["params/a"] == 6  # type: ignore[arg-type]


def test_is_damage_refused_as_when_opening(run: Path) -> None:
    segment = last_segment(run)
    whole = segment.read_bytes()
    flip_bit(segment, len(whole) // 2)
    with pytest.raises(LogDamagedError):
        looked_at(run)
    segment.write_bytes(whole[:-20])
    with pytest.raises(LogTruncatedError):
        looked_at(run)
    segment.unlink()
    with pytest.raises(LogTruncatedError):
        looked_at(run)
    segment.write_bytes(whole)
    (run / "FORMAT").write_bytes(encode_format("0" * 32))
    with pytest.raises(FormatError):
        looked_at(run)
    shutil.rmtree(run)
    with pytest.raises(NotFoundError):
        looked_at(run)


def test_is_a_storage_that_fails_no_reason_to_look(run: Path) -> None:
    def fail(path: str, *_: Any) -> None:
        if path.endswith("locks/wal"):
            raise OSError(errno.EIO, "Input/output error", path)

    with pytest.raises(StorageFailedError):
        open_to_look(str(run), files=InterposedFiles("open", fail))


def test_is_a_damaged_object_told(run: Path) -> None:
    with looked_at(run) as store:
        entry = store.resolve("side").shards["params/a"]
        flip_bit(Path(store.objects.path(entry.digest)), -1)
        with pytest.raises(ObjectCorruptError), store.at(ref="side") as view:
            view.read("params/a")


def test_is_a_commit_that_a_writer_retires_told(run: Path) -> None:
    """Without a lease: what was read of it need not be what it was."""

    def read_beside(step: int) -> None:
        with looked_at(run) as store, store.at(step=5) as view, shardb.open(run) as writer:
            view.read("params/a")
            commit_step(writer, step)

    read_beside(6)  # the control: step 5 goes with the second one
    with pytest.raises(ConflictError, match="retired while it was read"):
        read_beside(7)


def test_is_a_copy_whole_or_told_that_its_commit_went(run: Path, tmp_path: Path) -> None:
    """What was copied whole needs no lease afterwards; what could not be is no damage."""
    with shardb.open(tmp_path / "copy", create=True) as target, shardb.open(run) as writer:
        with looked_at(run) as store:
            assert copy_commit(store, target).step == 5
            commit_step(writer, 6)
            commit_step(writer, 7)
            assert copy_commit(store, target).step == 5, "it is there already"
        with shardb.open(tmp_path / "other", create=True) as other, looked_at(run) as store:
            commit_step(writer, 8)
            commit_step(writer, 9)
            with pytest.raises(ConflictError, match="retired while it was read"):
                copy_commit(store, other)
            assert other.branches() == {}


def test_are_two_names_for_one_thing_refused(run: Path) -> None:
    with looked_at(run) as store, pytest.raises(NotFoundError, match="did you mean side"):
        store.at(ref="sied")
