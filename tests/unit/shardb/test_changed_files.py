"""Is nothing trained on, committed or published that somebody else wrote into an object's file?"""

from __future__ import annotations

import mmap
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest

import shardb
from shardb import Transaction
from shardb.errors import ObjectCorruptError
from shardb.filesystem import RealFileSystem
from shardb.patrol import Patrol
from shardb.records import ShardEntry
from shardb.transfer_publisher import Publisher
from tests.support.stores import filled

MEMORY = Path("/dev/shm")
FROZEN, TRAINED = "base/a", "params/a"


@pytest.fixture
def memory_root() -> Iterator[str]:
    if not MEMORY.is_dir() or RealFileSystem().kind(str(MEMORY)) != "memory:tmpfs":
        pytest.skip("there is no RAM disk here")
    folder = tempfile.mkdtemp(prefix="shardb-test-", dir=MEMORY)
    yield f"{folder}/store"
    shutil.rmtree(folder)


@pytest.fixture
def active(memory_root: str) -> Iterator[shardb.Store]:
    with shardb.open(memory_root, create=True) as store:
        first_step(store)
        yield store


def first_step(store: shardb.Store) -> None:
    with store.begin() as transaction:
        transaction.write(FROZEN, filled(7), trainable=False)
        transaction.write(TRAINED, filled(1))
        transaction.commit(step=1)


def next_step(store: shardb.Store) -> shardb.Commit:
    """Make a step as a trainer does: read what there is, and stage what comes of it."""
    with store.begin() as transaction:
        assert transaction.base is not None
        step = transaction.base.step + 1
        stage_from(transaction)
        return transaction.commit(step=step)


def stage_from(transaction: Transaction) -> None:
    frozen, trained = transaction.read(FROZEN), transaction.read(TRAINED)
    tensors = {name: trained.array(name) + frozen.array(name) for name in trained.specs}
    transaction.write(TRAINED, tensors)


def steps(store: shardb.Store, count: int) -> None:
    for _ in range(count):
        next_step(store)


def patrolled(store: shardb.Store) -> None:
    """Wait for the object that is digested in the background: it is as it was at its commit."""
    for _, running in store.patrol._running.values():
        wait([running])


def path_of(store: shardb.Store, shard: str) -> str:
    return store.objects.path(store.branches()["main"].shards[shard].digest)


def change(path: str, *, kept: bool = False, mapped: bool = False) -> None:
    """Write other bytes (the same ones where `kept`) over the end of a file.

    With `mapped` no trace is left but the bytes.
    """
    size, before = os.path.getsize(path), os.stat(path)
    with open(path, "r+b") as file:
        file.seek(size - 4)
        old = file.read(4)
        new = old if kept else bytes(byte ^ 0x40 for byte in old)
        if mapped:
            with mmap.mmap(file.fileno(), size) as view:
                view[size - 4 :] = new
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        else:
            file.seek(size - 4)
            file.write(new)


@pytest.mark.parametrize("shard", [FROZEN, TRAINED])
def test_is_an_own_object_checked_again_when_its_file_was_written_to(
    active: shardb.Store, shard: str
) -> None:
    next_step(active)
    patrolled(active)
    path = path_of(active, shard)
    change(path)
    for _ in range(2):
        with pytest.raises(ObjectCorruptError, match=re.escape(path)):
            next_step(active)
    assert active.branches()["main"].step == 2
    change(path)  # its bytes are right again, whoever brought them back
    assert next_step(active).step == 3


def test_does_what_the_patrol_saw_count_once_although_the_bytes_came_back(
    active: shardb.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever restores an object below a trainer may meet one more refusal, and not two."""
    changed, digest = threading.Event(), Patrol._digest

    def late(patrol: Patrol, entry: ShardEntry) -> None:
        changed.wait()
        digest(patrol, entry)

    patrolled(active)
    monkeypatch.setattr(Patrol, "_digest", late)
    next_step(active)
    path = path_of(active, TRAINED)
    change(path, mapped=True)
    changed.set()
    patrolled(active)
    change(path)
    with pytest.raises(ObjectCorruptError, match=f"shard '{TRAINED}' was changed by somebody"):
        next_step(active)
    assert next_step(active).step == 3


@pytest.mark.parametrize("shard", [FROZEN, TRAINED])
def test_is_it_refused_as_soon_as_it_is_read(active: shardb.Store, shard: str) -> None:
    """Before anything is computed of it: a commit would be refused in any case."""
    next_step(active)
    path = path_of(active, shard)
    with active.at() as view:
        view.read(shard)
        change(path)
        with pytest.raises(ObjectCorruptError, match=re.escape(path)):
            view.read(shard)


@pytest.mark.parametrize("shard", [FROZEN, TRAINED])
def test_is_no_step_committed_whose_base_was_written_to_meanwhile(
    active: shardb.Store, shard: str
) -> None:
    with active.begin() as transaction:
        stage_from(transaction)
        change(path_of(active, shard))
        with pytest.raises(ObjectCorruptError, match=f"shard '{shard}' was changed by somebody"):
            transaction.commit(step=2)
    assert active.branches()["main"].step == 1


def test_is_a_file_that_keeps_its_bytes_no_reason_to_stop(active: shardb.Store) -> None:
    for shard in (FROZEN, TRAINED):
        change(path_of(active, shard), kept=True)
    with active.begin() as transaction:
        stage_from(transaction)
        os.utime(path_of(active, FROZEN))
        assert transaction.commit(step=2).step == 2


def test_is_a_frozen_object_in_memory_digested_in_turn(active: shardb.Store) -> None:
    steps(active, 3)  # so that every file was filled before
    path = path_of(active, FROZEN)
    change(path, mapped=True)
    with pytest.raises(ObjectCorruptError, match=f"shard '{FROZEN}'.*{re.escape(path)}"):
        steps(active, 4)


def test_is_nothing_published_whose_bytes_were_changed(
    active: shardb.Store, tmp_path: Path
) -> None:
    """The durable store keeps its last step, and tells which shard it is."""
    with shardb.open(tmp_path / "durable", create=True) as durable:
        with Publisher(active, durable) as publisher:
            publisher.publish()
            publisher.wait()
            wrong = next_step(active)
            change(path_of(active, TRAINED), mapped=True)
            publisher.publish(wrong)
            with pytest.raises(ObjectCorruptError, match=f"shard '{TRAINED}' .*step 2"):
                publisher.wait()
        assert durable.branches()["main"].step == 1


def test_is_an_own_object_on_a_disk_checked_when_it_is_first_read(tmp_path: Path) -> None:
    """What is not kept in memory comes from the medium, which may have lost it."""
    with shardb.open(tmp_path / "store", create=True, cache_bytes=0) as store:
        first_step(store)
        change(path_of(store, TRAINED), mapped=True)
        with pytest.raises(ObjectCorruptError, match="have digest"):
            next_step(store)


def test_is_an_object_on_a_disk_checked_again_before_a_commit(tmp_path: Path) -> None:
    with shardb.open(tmp_path / "store", create=True, cache_bytes=0) as store:
        first_step(store)
        with store.begin() as transaction:
            stage_from(transaction)
            change(path_of(store, FROZEN))
            with pytest.raises(ObjectCorruptError, match=f"shard '{FROZEN}' was changed"):
                transaction.commit(step=2)


def test_is_nothing_asked_where_nobody_wants_to_know(memory_root: str) -> None:
    with shardb.open(memory_root, create=True, verify=False) as store:
        first_step(store)
        change(path_of(store, FROZEN))
        assert next_step(store).step == 2
