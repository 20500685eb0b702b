"""Does whatever breaks on the way, or was broken there, change nothing at either end?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardb
from shardb.errors import (
    CorruptionError,
    NotFoundError,
    ObjectCorruptError,
    RemoteFailedError,
    UsageError,
)
from shardb.remote import layout
from shardb.remote.bucket import Bucket
from shardb.remote.cloud import CloudBucket
from shardb.remote.pull import pull_commit
from shardb.remote.push import push_commit
from shardb.remote.repository import RemoteStore
from shardb.remote.urls import is_url, open_bucket, open_remote
from shardb.transfer_tally import Tally
from tests.support.transfer_stores import commit, contents


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
        try:
            failure = failures.pop()  # one call, for several threads upload
        except IndexError:
            plain(self, key, size_bytes, chunks)
            return
        next(chunks)
        raise failure

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
