"""Does memory hold the newest images, within its limit, and never another object's bytes?"""

from __future__ import annotations

import numpy as np
import pytest

from shardb import layout
from shardb.buffers import PAGE_BYTES, BufferPool, PooledBuffer
from shardb.cache import ImageCache
from shardb.filesystem import Stamp
from shardb.layout import Layout, TensorSpec

LAYOUT = layout.build({"weight": TensorSpec(dtype="U8", shape=(64,))})
IMAGE_BYTES = 2 * PAGE_BYTES


@pytest.fixture
def pool() -> BufferPool:
    return BufferPool(limit_bytes=1 << 20)


@pytest.fixture
def cache(pool: BufferPool) -> ImageCache:
    return ImageCache(pool, limit_bytes=2 * IMAGE_BYTES)


def filled_buffer(pool: BufferPool, value: int) -> PooledBuffer:
    buffer = pool.take(LAYOUT.size_bytes, "main")
    buffer.array(LAYOUT.size_bytes, writable=True)[:] = value
    return buffer


def value(found: tuple[Layout, np.ndarray] | None) -> int | None:
    return None if found is None else int(found[1][-1])


def test_is_an_image_given_as_it_was_put(cache: ImageCache, pool: BufferPool) -> None:
    cache.put("a", LAYOUT, filled_buffer(pool, 1))
    found = cache.get("a")
    assert found is not None
    assert found[0] is LAYOUT
    assert len(found[1]) == LAYOUT.size_bytes
    assert value(found) == 1
    assert not found[1].flags.writeable
    assert cache.get("b") is None


def test_does_the_least_recently_used_image_go(cache: ImageCache, pool: BufferPool) -> None:
    for number, digest in enumerate("ab"):
        cache.put(digest, LAYOUT, filled_buffer(pool, number))
    cache.get("a")
    cache.put("c", LAYOUT, filled_buffer(pool, 2))
    assert [value(cache.get(digest)) for digest in "abc"] == [0, None, 2]
    assert cache.bytes == 2 * IMAGE_BYTES


def test_is_a_cache_of_no_bytes_empty(pool: BufferPool) -> None:
    cache = ImageCache(pool, limit_bytes=0)
    cache.put("a", LAYOUT, filled_buffer(pool, 1))
    assert cache.get("a") is None
    assert cache.bytes == 0
    assert pool.free_bytes == IMAGE_BYTES


def test_is_an_evicted_image_not_reused_while_it_is_read(
    cache: ImageCache, pool: BufferPool
) -> None:
    cache.put("a", LAYOUT, filled_buffer(pool, 1))
    held = cache.get("a")
    for number in range(2, 6):
        cache.put(str(number), LAYOUT, filled_buffer(pool, number))
    assert cache.get("a") is None
    assert value(held) == 1


def test_does_a_forgotten_image_go_to_the_caller(cache: ImageCache, pool: BufferPool) -> None:
    buffer = filled_buffer(pool, 1)
    cache.put("a", LAYOUT, buffer)
    assert cache.pop("a") is buffer
    assert cache.pop("a") is None
    assert cache.get("a") is None
    assert cache.bytes == 0


def test_does_a_second_image_of_an_object_take_the_place_of_the_first(
    cache: ImageCache, pool: BufferPool
) -> None:
    first, second = filled_buffer(pool, 1), filled_buffer(pool, 1)
    first.path, second.path = "replaced", "objects/a"
    cache.put("a", LAYOUT, first)
    cache.put("a", LAYOUT, second)
    assert cache.bytes == IMAGE_BYTES
    assert first.path is None
    assert cache.pop("a") is second
    assert pool.free_bytes == IMAGE_BYTES


def test_is_a_mapped_image_refused_when_its_file_is_another_now(
    cache: ImageCache, pool: BufferPool
) -> None:
    buffer = filled_buffer(pool, 1)
    buffer.stamp = Stamp(5, 0)
    cache.put("a", LAYOUT, buffer)
    assert cache.get("a", inode=6) is None
    assert value(cache.get("a", inode=5)) == 1
