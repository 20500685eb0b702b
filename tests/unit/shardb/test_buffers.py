"""Is memory handed out again only when nobody can see it any more?"""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

from shardb.buffers import HUGE_PAGE_BYTES, PAGE_BYTES, BufferPool, PooledBuffer, padded


@pytest.fixture
def pool() -> BufferPool:
    return BufferPool(limit_bytes=1 << 20)


def take(pool: BufferPool, length: int = 100) -> PooledBuffer:
    return pool.take(length, "main")


@pytest.mark.parametrize(
    ("length", "unit", "expected"),
    [(0, 4096, 0), (1, 4096, 4096), (4096, 4096, 4096), (4097, 4096, 8192), (5, 2, 6)],
)
def test_is_a_length_rounded_up(length: int, unit: int, expected: int) -> None:
    assert padded(length, unit) == expected


def test_is_memory_aligned_for_direct_writes(pool: BufferPool) -> None:
    for length in (1, 5000, HUGE_PAGE_BYTES + 1):
        array = take(pool, length).array(length, writable=True)
        assert len(array) == length
        assert array.ctypes.data % PAGE_BYTES == 0


def test_is_large_memory_a_whole_number_of_huge_pages(pool: BufferPool) -> None:
    assert take(pool, HUGE_PAGE_BYTES + 1).size_bytes == 2 * HUGE_PAGE_BYTES
    assert take(pool, HUGE_PAGE_BYTES - 1).size_bytes == HUGE_PAGE_BYTES
    assert take(pool, 4097).size_bytes == 8192


def test_is_a_read_only_array_read_only(pool: BufferPool) -> None:
    buffer = take(pool)
    writable, fixed = buffer.array(100, writable=True), buffer.array(100, writable=False)
    writable[:] = 7
    assert fixed[99] == 7
    with pytest.raises(ValueError, match="read-only"):
        fixed[0] = 1


def test_is_an_idle_buffer_used_again(pool: BufferPool) -> None:
    buffer = take(pool)
    buffer.release(pool)
    assert pool.free_bytes == PAGE_BYTES
    assert take(pool) is buffer
    assert pool.free_bytes == 0


def test_is_a_buffer_kept_while_anything_made_from_it_lives(pool: BufferPool) -> None:
    buffer = take(pool)
    derived: Any = buffer.array(96, writable=True).view(np.float32).reshape(4, 6)[1:, ::2].T
    buffer.release(pool)
    other = take(pool)
    assert other is not buffer
    assert buffer.exports == 1
    derived[:] = 3
    del derived
    assert buffer.exports == 0
    assert take(pool) is buffer


def test_are_all_arrays_counted(pool: BufferPool) -> None:
    buffer = take(pool)
    arrays = [buffer.array(10, writable=False) for _ in range(3)]
    buffer.release(pool)
    while arrays:
        assert take(pool) is not buffer
        arrays.pop()
    assert take(pool) is buffer


def test_is_a_buffer_not_there_twice(pool: BufferPool) -> None:
    """Two last arrays may end at once, each believing that it was the last."""
    buffer = take(pool)
    buffer.release(pool)
    pool.put_back(buffer)
    assert take(pool) is buffer
    assert take(pool) is not buffer


def test_is_the_memory_that_waits_bounded() -> None:
    pool = BufferPool(limit_bytes=2 * PAGE_BYTES)
    buffers = [take(pool) for _ in range(5)]
    for buffer in buffers:
        buffer.release(pool)
    assert pool.free_bytes == 2 * PAGE_BYTES


@pytest.mark.parametrize("where", ["pool", "buffer"])
def test_may_an_array_end_while_the_pool_is_locked(pool: BufferPool, where: str) -> None:
    """A garbage collection in the middle of the pool's own code must not wait for the pool."""
    buffer = take(pool)
    array = [buffer.array(10, writable=False)]
    buffer.release(pool)
    lock: Any = pool._lock if where == "pool" else buffer._lock
    thread = threading.Thread(target=array.clear, daemon=True)
    with lock:
        thread.start()
        thread.join(timeout=5)
        assert not thread.is_alive()
    assert take(pool) is buffer


def test_do_arrays_in_cycles_end_with_a_collection(pool: BufferPool) -> None:
    buffer = take(pool)
    cycle: list[Any] = [buffer.array(10, writable=False)]
    cycle.append(cycle)
    buffer.release(pool)
    del cycle
    gc.collect()
    assert take(pool) is buffer


def test_do_many_threads_get_buffers_of_their_own(pool: BufferPool) -> None:
    def work(number: int) -> None:
        for round_ in range(200):
            buffer = take(pool)
            array = buffer.array(8, writable=True)
            array[:] = number
            if not np.all(array == number):
                wrong.append((number, round_))
            del array
            buffer.release(pool)

    wrong: list[tuple[int, int]] = []
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert pool.free_bytes <= 4 * PAGE_BYTES
