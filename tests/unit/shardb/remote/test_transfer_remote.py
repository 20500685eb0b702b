"""Does a remote store hold what was pushed, whole, and lose nobody's commit?

The same tests for every bucket that needs no server; `tests/process` has them for S3.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest

import shardb
from shardb import branching
from shardb.errors import (
    ConflictError,
    NotFoundError,
    SnapshotExistsError,
    UsageError,
)
from shardb.remote import layout
from shardb.remote.clone import clone_from, clone_to
from shardb.remote.pull import pull_commit, pull_snapshot
from shardb.remote.push import push_commit, push_snapshot
from shardb.remote.repository import RemoteStore
from shardb.retention import Policy
from shardb.transfer import clone
from shardb.transfer_tally import Tally
from tests.support.transfer_stores import commit, contents, told_steps


def test_is_what_is_pulled_what_was_pushed(
    source: shardb.Store, target: shardb.Store, remote: RemoteStore
) -> None:
    head = push_commit(source, remote)
    assert remote.branches()["main"].commit == head.id
    pulled = pull_commit(remote, target)
    assert (pulled.id, pulled.step, pulled.state) == (head.id, head.step, head.state)
    assert contents(target) == contents(source)
    assert told_steps(target) == [0, 1, 2]
    assert commit(source, 3).shards == commit(target, 3).shards


def test_are_the_objects_files_that_any_tool_opens(
    source: shardb.Store, remote: RemoteStore
) -> None:
    head = push_commit(source, remote)
    keys = set(remote.bucket.keys(layout.OBJECTS))
    assert keys == {f"objects/{entry.digest}.safetensors" for entry in head.shards.values()}
    for entry in head.shards.values():
        data = b"".join(remote.bucket.chunks(layout.object_key(entry.digest), 0))
        assert data == Path(source.objects.path(entry.digest)).read_bytes()


def test_is_only_what_is_missing_moved(
    source: shardb.Store, target: shardb.Store, remote: RemoteStore
) -> None:
    push_commit(source, remote)
    pull_commit(remote, target)
    commit(source, 3)
    up, down = Tally(), Tally()
    push_commit(source, remote, tally=up)
    pull_commit(remote, target, tally=down)
    for counts in (up.counts, down.counts):
        assert counts.objects_present == 1
        assert counts.objects_done == counts.objects_total == 4
        assert counts.bytes_done == counts.bytes_total
    again = Tally()
    push_commit(source, remote, tally=again)
    pull_commit(remote, target, tally=again)
    assert again.counts.objects_total == 0
    assert told_steps(target) == [0, 1, 2, 3]


def test_does_the_second_of_two_lines_get_a_conflict(
    source: shardb.Store, target: shardb.Store, remote: RemoteStore
) -> None:
    push_commit(source, remote)
    pull_commit(remote, target)
    theirs, ours = commit(target, 3, seed=1), commit(source, 4)
    push_commit(target, remote)
    with pytest.raises(ConflictError, match="--branch other") as caught:
        push_commit(source, remote)
    assert theirs.id in str(caught.value)
    assert ours.id in str(caught.value)
    assert remote.branches()["main"].commit == theirs.id
    push_commit(source, remote, branch="other")
    assert remote.branches()["other"].commit == ours.id
    with pytest.raises(ConflictError, match="does not come"):
        pull_commit(remote, source)
    pull_commit(remote, source, branch="theirs")
    assert contents(source, "theirs") == contents(target)


def test_does_a_pusher_that_is_overtaken_between_look_and_move_notice(
    source: shardb.Store, target: shardb.Store, remote: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    push_commit(source, remote)
    pull_commit(remote, target)
    theirs = commit(target, 3, seed=1)
    commit(source, 3)
    plain = RemoteStore.move_branch
    overtaken = threading.Event()

    def late(self: RemoteStore, *arguments: Any) -> bool:
        if not overtaken.is_set():
            overtaken.set()
            push_commit(target, remote)
        return plain(self, *arguments)

    monkeypatch.setattr(RemoteStore, "move_branch", late)
    with pytest.raises(ConflictError, match="does not come"):
        push_commit(source, remote)
    assert remote.branches()["main"].commit == theirs.id


def test_is_a_branch_that_moved_on_our_own_line_followed(
    source: shardb.Store, remote: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two publishers of one run: the older step moves the branch first, then the newer."""
    older, newer = source.resolve("step-1"), source.resolve("step-2")
    plain = RemoteStore.move_branch

    def late(self: RemoteStore, *arguments: Any) -> bool:
        if arguments[-1].id == newer.id and "main" not in remote.branches():
            push_commit(source, remote, older.id)
        return plain(self, *arguments)

    monkeypatch.setattr(RemoteStore, "move_branch", late)
    push_commit(source, remote)
    assert remote.branches()["main"].commit == newer.id


def test_is_the_expected_head_compared(source: shardb.Store, remote: RemoteStore) -> None:
    push_commit(source, remote, "step-1", expected_head=None)
    with pytest.raises(ConflictError, match="as expected"):
        push_commit(source, remote, expected_head=None)


def test_is_an_older_commit_that_is_there_nothing_to_do(
    source: shardb.Store, remote: RemoteStore
) -> None:
    push_commit(source, remote, "step-1")
    push_commit(source, remote)
    push_commit(source, remote, "step-1")
    assert remote.branches()["main"].step == 2


def test_are_snapshots_written_once(
    source: shardb.Store, target: shardb.Store, remote: RemoteStore
) -> None:
    source.create_snapshot("best", "step-1")
    push_snapshot(source, remote, "best")
    push_snapshot(source, remote, "best")
    assert remote.branches() == {}
    pull_snapshot(remote, target, "best")
    assert contents(target, "best") == contents(source, "best")
    branching.delete_snapshot(source, "best")
    source.create_snapshot("best", "step-2")
    with pytest.raises(SnapshotExistsError, match="'best' exists"):
        push_snapshot(source, remote, "best")
    push_commit(source, remote)
    assert told_steps_of(remote) == [0, 1, 2]


def told_steps_of(remote: RemoteStore) -> list[int]:
    """The steps that the records of a remote store tell."""
    steps: list[int] = []
    for name in remote.commit_ids():
        record = remote.record(name)
        assert record is not None
        steps += [entry["step"] for entry in record["rolled_up"]] + [record["step"]]
    return sorted(steps)


def test_what_do_references_mean(source: shardb.Store, remote: RemoteStore) -> None:
    source.create_snapshot("best", "step-1")
    push_snapshot(source, remote, "best")
    head = push_commit(source, remote)
    for ref in (None, "main", "step-2", head.id, head.id[:-4], head.id.upper()):
        assert remote.resolve(ref)["id"] == head.id
    assert remote.resolve("best")["step"] == remote.resolve("step-1")["step"] == 1
    with pytest.raises(NotFoundError, match="did you mean best"):
        remote.resolve("bets")
    with pytest.raises(UsageError, match="give more of it"):
        remote.resolve(head.id[:4])


def test_has_a_clone_everything_there_and_back(
    source: shardb.Store, target: shardb.Store, remote: RemoteStore, quick_path: Path
) -> None:
    source.create_snapshot("first", "step-1")
    branching.set_policy(source, Policy(keep_last=3))
    branching.create_branch(source, "a/b", "step-1")
    commit(source, 5, branch="a/b")
    for _ in range(2):
        clone_to(source, remote)
        cloned = clone_from(remote, target)
    assert {n: c.id for n, c in cloned.branches.items()} == {
        n: c.id for n, c in source.branches().items()
    }
    for ref in ("main", "a/b", "first"):
        assert contents(target, ref) == contents(source, ref)
    assert branching.policy_of(target) == Policy(keep_last=3)
    assert told_steps(target) == [0, 1, 5, 0, 1, 2]
    with shardb.open(quick_path / "stranger", create=True) as stranger:
        commit(stranger, 0, seed=2)
        with pytest.raises(ConflictError, match="is here already"):
            clone_from(remote, stranger)
        with pytest.raises(ConflictError, match="is here already"):
            clone_to(stranger, remote)


def test_does_a_clone_to_an_empty_place_find_nothing_there(
    source: shardb.Store, target: shardb.Store, remote: RemoteStore
) -> None:
    """What its own snapshots and branches share is told once, as copied."""
    source.create_snapshot("two", "step-2")
    branching.create_branch(source, "other", "step-1")
    up, down, beside = Tally(), Tally(), Tally()
    clone_to(source, remote, tally=up)
    clone_from(remote, target, tally=down)
    with shardb.open(Path(target.root).with_name("beside"), create=True) as third:
        clone(source, third, tally=beside)
    for counts in (up.counts, down.counts, beside.counts):
        assert counts.objects_present == counts.objects_resumed == 0
        assert counts.objects_done == counts.objects_total == 7  # one of four shards is frozen
        assert counts.bytes_done == counts.bytes_total == counts.bytes_moved
    again = Tally()
    clone_to(source, remote, tally=again)
    assert again.counts.bytes_moved == 0


def test_does_a_clone_tell_a_bucket_that_went_from_a_name_that_did(
    source: shardb.Store,
    target: shardb.Store,
    remote: RemoteStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name may be gone on without; a place is not found, exit code 4."""
    clone_to(source, remote)

    def gone(*_: object) -> NoReturn:
        raise NotFoundError("there is no bucket", path="s3://bucket/objects")

    monkeypatch.setattr(remote.bucket, "chunks", gone)
    with pytest.raises(NotFoundError, match=r"^there is no bucket"):
        clone_from(remote, target)
    monkeypatch.setattr(remote, "resolve", no_name)
    with pytest.raises(ConflictError, match="went while the store was copied"):
        clone_from(remote, target)


def no_name(name: str) -> NoReturn:
    raise NotFoundError(f"there is no {name}")
