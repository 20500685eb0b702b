"""Does publishing run beside training, one commit at a time, and tell its errors?"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardb
from shardb.errors import BranchLockedError, NotFoundError, ObjectCorruptError
from shardb.records import ShardEntry
from shardb.transfer_publisher import Publisher
from shardb.transfer_source import StoreSource
from tests.support.transfer_stores import commit, contents, told_steps


@pytest.fixture
def source(quick_path: Path) -> Iterator[shardb.Store]:
    with shardb.open(quick_path / "active", create=True) as store:
        commit(store, 0)
        yield store


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event without which no object's bytes leave the source."""
    gate = threading.Event()
    plain = StoreSource.chunks

    def waiting(self: StoreSource, entry: ShardEntry) -> Any:
        assert gate.wait(timeout=30)
        yield from plain(self, entry)

    monkeypatch.setattr(StoreSource, "chunks", waiting)
    return gate


def test_does_training_go_on_meanwhile(
    source: shardb.Store, target: shardb.Store, gate: threading.Event
) -> None:
    with Publisher(source, target) as publisher:
        first = source.resolve("main")
        assert publisher.publish(first) < 5
        for step in range(1, 6):
            commit(source, step)
        assert publisher.busy
        assert publisher.durable_step is None
        gate.set()
        assert publisher.wait() == 0
        assert not publisher.busy
        publisher.publish()
    assert target.durable_step() == 5
    assert told_steps(target) == list(range(6))
    assert contents(target) == contents(source)


def test_is_the_commit_leased_until_it_is_copied(
    source: shardb.Store, target: shardb.Store, gate: threading.Event
) -> None:
    first = source.resolve("main")
    with Publisher(source, target) as publisher:
        publisher.publish(first)
        for step in range(1, 4):
            commit(source, step)
        assert {lease["commit"] for lease in source.leases.describe_all()} == {first.id}
        gate.set()
        publisher.wait()
        assert source.leases.describe_all() == []
        with pytest.raises(NotFoundError):
            publisher.publish(first)
    assert target.resolve("main").id == first.id


def test_does_the_next_publish_wait(
    source: shardb.Store, target: shardb.Store, gate: threading.Event
) -> None:
    with Publisher(source, target) as publisher:
        publisher.publish()
        commit(source, 1)
        threading.Timer(0.2, gate.set).start()
        assert publisher.publish() > 0.1
    assert target.durable_step() == 1


def test_is_an_error_told_by_the_next_call(source: shardb.Store, target: shardb.Store) -> None:
    first = source.resolve("main")
    entry = first.shards["params/block_000"]
    commit(source, 1)
    source.cache.pop(entry.digest)
    path = Path(source.objects.path(entry.digest))
    with path.open("r+b") as file:
        file.seek(9000)
        file.write(b"rot")
    publisher = Publisher(source, target)
    publisher.publish(first)
    with pytest.raises(ObjectCorruptError):
        publisher.publish()
    publisher.publish()  # told once; the next commit is whole
    assert publisher.wait() == 1
    publisher.close()


def test_is_the_publisher_the_one_writer(
    source: shardb.Store, target: shardb.Store, quick_path: Path
) -> None:
    with Publisher(source, target), shardb.open(target.root) as other:
        with pytest.raises(BranchLockedError):
            other.begin("main")
        with pytest.raises(BranchLockedError):
            Publisher(source, other)
    with shardb.open(target.root) as other:
        commit(other, 0)


def test_does_an_error_of_the_block_come_first(source: shardb.Store, target: shardb.Store) -> None:
    entry = source.resolve("main").shards["params/block_000"]
    source.cache.pop(entry.digest)
    Path(source.objects.path(entry.digest)).unlink()

    def train(publisher: Publisher) -> None:
        publisher.publish()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), Publisher(source, target) as publisher:
        train(publisher)
