"""Is a record in the log exactly when it can be applied, and does the first failure count?"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import shardb
from shardb.errors import LogDamagedError, StorageFailedError, StorageFullError
from shardb.records import new_record
from tests.support.stores import InterposedFiles, answers, answers_at, commit_step


def test_is_a_record_that_cannot_be_applied_kept_out_of_the_log(store: shardb.Store) -> None:
    """It would stay there for good, and no opening could get past it."""
    commit_step(store, 1)
    before, records = answers(store), len(list(store.history()))
    bad = new_record("snapshot", name="x", commit="nowhere")
    with pytest.raises(LogDamagedError, match="nowhere"):
        store.appender.change(lambda _: bad)
    assert len(list(store.history())) == records
    assert answers(store) == before
    commit_step(store, 2)
    assert answers_at(Path(store.root))["branches"] == answers(store)["branches"]


def test_is_nothing_appended_when_there_is_nothing_to_say(store: shardb.Store) -> None:
    commit_step(store, 1)
    records = len(list(store.history()))
    assert store.appender.change(lambda _: None) is None
    assert len(list(store.history())) == records


def test_is_the_newest_state_what_a_change_is_made_from(store: shardb.Store) -> None:
    commit_step(store, 1)
    with shardb.open(store.root) as other:
        other.create_snapshot("theirs")
        seen: list[object] = []
        store.appender.change(lambda tables: seen.append(tables.get("snapshots", "theirs")))
    assert seen[0] is not None


@pytest.mark.parametrize(
    ("error", "poisoned"), [(errno.EIO, True), (errno.ENOSPC, False), (errno.EDQUOT, False)]
)
def test_does_a_failure_to_take_in_what_others_wrote_count(
    root: Path, error: int, poisoned: bool
) -> None:
    """Records of a writer that died are written again and synced: that sync may fail as any."""
    files = InterposedFiles("fdatasync", lambda *_: None)
    with shardb.open(root, create=True, files=files) as store:
        commit_step(store, 1)
        with shardb.open(root) as other:
            written = other.index.write

            def lose(*_: object) -> None:
                raise StorageFullError("the index")

            other.index.write = lose  # type: ignore[method-assign, assignment]
            other.create_snapshot("theirs")
            other.index.write = written  # type: ignore[method-assign]

        def fail(*_: object) -> None:
            raise OSError(error, os.strerror(error))

        files.before = fail
        with pytest.raises(StorageFailedError if poisoned else StorageFullError):
            store.begin()
        files.before = lambda *_: None
        if poisoned:
            with pytest.raises(StorageFailedError, match="open it again"):
                store.begin()
        else:
            commit_step(store, 2)
    with shardb.open(root) as store:
        assert "theirs" in store.snapshots()


def test_is_the_failure_that_poisoned_a_store_named_ever_after(store: shardb.Store) -> None:
    first = StorageFailedError("the first one")
    assert store.appender.fail(first) is first
    second = StorageFailedError("the second one")
    assert store.appender.fail(second) is second
    with pytest.raises(StorageFailedError, match="the first one"):
        store.appender.check_usable()
