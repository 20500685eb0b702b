"""Does a remote store hold what was pushed, whole, and lose nobody's commit?

The same tests for every bucket that needs no server; `tests/process` has them for S3.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardb
from shardb import branching
from shardb.errors import (
    ConflictError,
    CorruptionError,
    NotFoundError,
    ObjectCorruptError,
    RemoteFailedError,
    SnapshotExistsError,
    UsageError,
)
from shardb.filesystem import RealFileSystem
from shardb.remote import layout
from shardb.remote.bucket import Bucket
from shardb.remote.clone import clone_from, clone_to
from shardb.remote.cloud import CloudBucket
from shardb.remote.directory import DirectoryBucket
from shardb.remote.pull import pull_commit, pull_snapshot
from shardb.remote.push import push_commit, push_snapshot
from shardb.remote.repository import RemoteStore
from shardb.remote.urls import is_url, open_bucket, open_remote
from shardb.retention import Policy
from shardb.transfer_tally import Tally
from tests.support.transfer_stores import commit, contents, told_steps


@pytest.fixture
def source(quick_path: Path) -> Iterator[shardb.Store]:
    with shardb.open(quick_path / "source", create=True) as store:
        for step in range(3):
            commit(store, step)
        yield store


@pytest.fixture
def target(quick_path: Path) -> Iterator[shardb.Store]:
    with shardb.open(quick_path / "target", create=True) as store:
        yield store


@pytest.fixture(params=["directory", "memory"])
def bucket(request: pytest.FixtureRequest, quick_path: Path) -> Bucket:
    if request.param == "directory":
        return DirectoryBucket(RealFileSystem(), str(quick_path / "bucket"))
    library = pytest.importorskip("obstore.store", reason="the extra `remote` is not installed")
    return CloudBucket("memory://", library.MemoryStore())


@pytest.fixture
def remote(bucket: Bucket) -> RemoteStore:
    return RemoteStore(bucket, create=True)


def test_are_conditional_writes_conditional(bucket: Bucket) -> None:
    assert bucket.read("refs/a", limit_bytes=10) is None
    assert bucket.create("refs/a", b"1")
    assert not bucket.create("refs/a", b"2")
    first = bucket.read("refs/a", limit_bytes=10)
    assert first is not None
    assert bucket.replace("refs/a", b"3", first.version)
    assert not bucket.replace("refs/a", b"4", first.version)
    assert not bucket.replace("refs/b", b"4", first.version)
    second = bucket.read("refs/a", limit_bytes=10)
    assert second is not None
    assert second.data == b"3"
    with pytest.raises(CorruptionError):
        bucket.read("refs/a", limit_bytes=0)


def test_does_a_failed_upload_leave_nothing(bucket: Bucket) -> None:
    def broken() -> Iterator[bytes]:
        yield bytes(9 << 20)
        raise ObjectCorruptError("half of it")

    with pytest.raises(ObjectCorruptError, match="half of it"):
        bucket.upload("objects/x", 20 << 20, broken())
    assert bucket.size("objects/x") is None
    assert list(bucket.keys("objects/")) == []
    bucket.upload("objects/y", 12 << 20, iter([bytes(9 << 20), bytes(3 << 20)]))
    assert bucket.size("objects/y") == 12 << 20
    assert list(bucket.keys("objects/")) == ["objects/y"]
    assert sum(len(part) for part in bucket.chunks("objects/y", 5)) == (12 << 20) - 5


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
    with pytest.raises(ConflictError, match="give more of it"):
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


def test_does_an_interrupted_push_go_on(
    source: shardb.Store, remote: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: RemoteStore, record: Any) -> None:
        raise RemoteFailedError("the network is gone")

    with monkeypatch.context() as patch:
        patch.setattr(RemoteStore, "create_commit", broken)
        with pytest.raises(RemoteFailedError):
            push_commit(source, remote)
    assert remote.branches() == {}
    tally = Tally()
    push_commit(source, remote, tally=tally)
    assert tally.counts.objects_resumed == 4
    assert tally.counts.bytes_moved == 0


def test_does_a_damaged_source_upload_nothing_wrong(
    source: shardb.Store, remote: RemoteStore
) -> None:
    entry = source.resolve("main").shards["params/block_000"]
    source.cache.pop(entry.digest)
    with Path(source.objects.path(entry.digest)).open("r+b") as file:
        file.seek(5000)
        file.write(b"rot")
    with pytest.raises(ObjectCorruptError, match="nothing was pushed"):
        push_commit(source, remote)
    assert remote.bucket.size(layout.object_key(entry.digest)) is None
    assert remote.branches() == {}


def flip(remote: RemoteStore, key: str, *, cut: int = 0) -> None:
    data = bytearray(b"".join(remote.bucket.chunks(key, 0)))
    data[-1] ^= 1
    remote.bucket.upload(key, len(data), iter([bytes(data[: len(data) - cut])]))


@pytest.mark.parametrize("cut", [0, 10])
def test_does_a_damaged_remote_object_change_nothing(
    source: shardb.Store, target: shardb.Store, remote: RemoteStore, cut: int
) -> None:
    head = push_commit(source, remote)
    key = layout.object_key(head.shards["params/block_000"].digest)
    flip(remote, key, cut=cut)
    with pytest.raises(ObjectCorruptError, match="objects"):
        pull_commit(remote, target)
    assert target.branches() == {}
    assert list(Path(target.root, "objects").iterdir()) == []


def test_is_a_damaged_record_or_ref_an_error(
    source: shardb.Store, target: shardb.Store, remote: RemoteStore
) -> None:
    head = push_commit(source, remote)
    flip(remote, layout.commit_key(head.id))
    with pytest.raises(CorruptionError, match="damaged, or no commit record"):
        pull_commit(remote, target)
    key = layout.ref_key(layout.BRANCHES, "main")
    remote.bucket.upload(key, 2, iter([b"{}"]))
    with pytest.raises(CorruptionError, match="names no commit"):
        remote.branches()
    remote.bucket.upload(layout.FORMAT_KEY, 2, iter([b"{}"]))
    with pytest.raises(CorruptionError, match="not the FORMAT"):
        RemoteStore(remote.bucket, create=True)


def test_is_a_circle_of_parents_an_error(
    source: shardb.Store, target: shardb.Store, remote: RemoteStore
) -> None:
    head = push_commit(source, remote)
    record = remote.record(head.id)
    assert record is not None
    value = layout.encode_commit({**record, "parent": head.id})
    remote.bucket.upload(layout.commit_key(head.id), len(value), iter([value]))
    with pytest.raises(CorruptionError, match="its own ancestor"):
        pull_commit(remote, target)
    assert target.branches() == {}


def test_does_a_stream_that_breaks_go_on(
    source: shardb.Store, target: shardb.Store, remote: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    push_commit(source, remote)
    kind = type(remote.bucket)
    plain = kind.chunks
    starts: list[int] = []

    def breaking(self: Any, key: str, start: int) -> Iterator[memoryview]:
        starts.append(start)
        whole = memoryview(b"".join(plain(self, key, start)))
        yield whole[:200_000]
        if len(whole) > 200_000:
            raise RemoteFailedError("connection reset")

    monkeypatch.setattr(kind, "chunks", breaking)
    monkeypatch.setattr("shardb.remote.pull.FIRST_PAUSE_SECONDS", 0.001)
    pull_commit(remote, target)
    assert contents(target) == contents(source)
    assert {0, 200_000} <= set(starts)


def test_is_an_upload_that_fails_begun_again(
    source: shardb.Store, remote: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(remote.bucket)
    plain = kind.upload
    failures = [RemoteFailedError("connection reset")] * 3

    def flaky(self: Any, key: str, size_bytes: int, chunks: Iterator[bytes]) -> None:
        if key.startswith(layout.OBJECTS) and failures:
            next(chunks)
            raise failures.pop()
        plain(self, key, size_bytes, chunks)

    monkeypatch.setattr(kind, "upload", flaky)
    monkeypatch.setattr("shardb.remote.push.PAUSE_SECONDS", 0.001)
    tally = Tally()
    push_commit(source, remote, tally=tally)
    assert tally.counts.bytes_done == tally.counts.bytes_total
    assert tally.counts.objects_done == 4
    failures += [RemoteFailedError("gone for good")] * 100
    commit(source, 3)
    with pytest.raises(RemoteFailedError, match="gone for good"):
        push_commit(source, remote)
    assert remote.branches()["main"].step == 2


def test_is_storage_that_ignores_conditions_refused() -> None:
    library = pytest.importorskip("obstore.store", reason="the extra `remote` is not installed")

    class Careless:
        """Storage that takes a condition and writes all the same."""

        def __init__(self) -> None:
            self._store = library.MemoryStore()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

        def put(self, key: str, data: bytes, **options: Any) -> Any:
            options.pop("mode", None)
            return self._store.put(key, data, **options)

    with pytest.raises(UsageError, match="ignores If-None-Match or If-Match"):
        RemoteStore(CloudBucket("memory://", Careless()), create=True)


def test_is_there_no_store_where_nothing_was_pushed(bucket: Bucket, quick_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no store here"):
        RemoteStore(bucket, create=False)
    with pytest.raises(NotFoundError, match="parent directory"):
        open_remote(f"file://{quick_path}/no/where", create=True)


@pytest.mark.parametrize("url", ["ftp://x/y", "file://host/x", "s3://", "s3://b/x?y=1"])
def test_is_a_bad_url_an_error(url: str) -> None:
    assert is_url(url)
    with pytest.raises(UsageError):
        open_bucket(url)
