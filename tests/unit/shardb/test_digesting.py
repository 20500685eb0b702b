"""Is a digest that is taken while an image grows the digest of the whole image?"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import xxhash

import shardb
from shardb import TensorSpec
from shardb.digesting import GrowingDigest

SIZE = 100_000
SPECS = {"w": TensorSpec(dtype="F32", shape=(64, 1024))}


def image() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)


@pytest.mark.parametrize("steps", [[], [SIZE], [1, 2, 2, 5000, 70_001], range(0, SIZE, 997)])
def test_is_it_the_digest_of_all_bytes(steps: list[int]) -> None:
    whole, started = image(), list[Callable[[], None]]()
    digest = GrowingDigest(whole, started.append)
    for size in steps:
        digest.fill_to(size)
        if size % 2:  # some tasks come late, or never
            started.pop(0)()
    assert digest.finish() == xxhash.xxh3_128_hexdigest(whole.tobytes())
    for late in started:
        late()
    assert digest.finish() == xxhash.xxh3_128_hexdigest(whole.tobytes())


def test_has_an_image_one_task_at_a_time_that_catches_up() -> None:
    whole, started = image(), list[Callable[[], None]]()
    digest = GrowingDigest(whole, started.append)
    for size in range(1000, 50_000, 1000):
        digest.fill_to(size)
    assert len(started) == 1  # more would only keep threads from other images
    started.pop()()
    digest.fill_to(60_000)
    assert len(started) == 1
    assert digest.finish() == xxhash.xxh3_128_hexdigest(whole.tobytes())


def test_do_tasks_of_many_threads_take_turns() -> None:
    whole = image()
    expected = xxhash.xxh3_128_hexdigest(whole.tobytes())
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            digest = GrowingDigest(whole, pool.submit)
            for size in range(0, SIZE, 5003):
                digest.fill_to(size)
            assert digest.finish() == expected


def test_does_who_wants_the_end_take_over_from_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waited for the task instead would keep another image from being digested."""
    monkeypatch.setattr("shardb.digesting.PART_BYTES", 1000)
    whole, parts = image(), list[int]()

    class Slow:
        """Digests; the first part takes until the end is wanted."""

        def __init__(self) -> None:
            self.inner = xxhash.xxh3_128()
            self.hexdigest = self.inner.hexdigest

        def update(self, part: memoryview) -> None:
            parts.append(threading.get_ident())
            self.inner.update(part)
            while not digest._is_wanted:
                time.sleep(0.001)

    with ThreadPoolExecutor(1) as pool:
        digest = GrowingDigest(whole, pool.submit)
        monkeypatch.setattr(digest, "_digest", Slow())
        digest.fill_to(SIZE)
        while not parts:
            time.sleep(0.001)
        assert digest.finish() == xxhash.xxh3_128_hexdigest(whole.tobytes())
    assert parts.count(parts[0]) == 1  # the task did no more than what it was at
    assert parts.count(threading.get_ident()) == len(parts) - 1 == SIZE // 1000 - 1


def test_is_nothing_held_once_it_is_finished() -> None:
    whole = image()
    digest = GrowingDigest(whole, lambda work: work())
    digest.finish()
    assert digest._image.size == 0


@pytest.mark.parametrize("pieces", [1, 7])
def test_is_a_mapped_image_committed_under_its_digest(quick_path: Path, pieces: int) -> None:
    value = np.random.default_rng(2).normal(size=(64, 1024)).astype(np.float32)
    with shardb.open(quick_path / "run", create=True, writer_threads=2) as store:
        for step in (1, 2):
            with store.begin("main") as txn:
                staged = txn.stage("params/a", SPECS)
                start, rows = staged.bytes - value.nbytes, staged.array("w")
                for piece in np.array_split(np.arange(64), pieces):
                    rows[piece] = value[piece] + step
                    staged.filled(start + int(piece[-1] + 1) * 4096)
                del rows
                staged.seal()
                staged.filled(staged.bytes)  # said too late: nothing comes of it
                commit = txn.commit(step=step)
        digest = commit.shards["params/a"].digest
    with shardb.open(quick_path / "run") as store, store.at(branch="main") as view:
        assert np.array_equal(view.read("params/a").array("w"), value + 2)
        raw = (quick_path / "run" / "objects" / f"{digest}.safetensors").read_bytes()
        assert xxhash.xxh3_128_hexdigest(raw) == digest


def test_control_what_is_changed_after_it_was_called_filled_is_noticed(quick_path: Path) -> None:
    with shardb.open(quick_path / "run", create=True, writer_threads=0) as store:
        if not store.mapped:
            pytest.skip("needs a store in memory")
        with store.begin("main") as txn:
            staged = txn.stage("params/a", SPECS)
            rows = staged.array("w")
            rows[:] = 1
            staged.filled(staged.bytes)
            rows[3] = 2
            del rows
            txn.commit(step=1)
    with (
        shardb.open(quick_path / "run") as store,
        store.at(branch="main") as view,
        pytest.raises(shardb.errors.ObjectCorruptError),
    ):
        view.read("params/a")


def test_is_a_discarded_image_let_go(quick_path: Path) -> None:
    with shardb.open(quick_path / "run", create=True, writer_threads=2) as store:
        with store.begin("main") as txn:
            for _ in range(3):
                staged = txn.stage("params/a", SPECS)
                staged.array("w")[:] = 1
                staged.filled(staged.bytes // 2)
                txn.discard("params/a")
            txn.write("params/a", {"w": np.zeros((64, 1024), np.float32)})
            txn.commit(step=1)
        with store.at(branch="main") as view:
            assert not view.read("params/a").array("w").any()
