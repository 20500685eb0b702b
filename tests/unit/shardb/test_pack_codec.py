"""Does every object come out of its packed form as it went in, and only shorter where it pays?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardb.buffers import Bytes
from shardb.errors import UsageError
from shardb.filesystem import RealFileSystem
from shardb.layout import Layout, TensorSpec
from shardb.layout import build as build_layout
from shardb.pack_codec import Compressors, plan, segments_of
from shardb.pack_format import CHUNK_BYTES, SEGMENTS_MAX, planes_at
from shardb.pack_planes import BLOCK_BYTES, difference, join, restored, split
from shardb.pack_reading import packed_content
from tests.support.packs import digest_of, image_of, unpacked, weights, write_object, write_pack


def random_bytes(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
def test_are_planes_put_together_what_was_split(item_bytes: int) -> None:
    chunk = random_bytes(24 * item_bytes)
    planes = split(chunk, item_bytes)
    assert [len(plane) for plane in planes] == [24] * item_bytes
    assert planes[-1].tolist() == chunk[item_bytes - 1 :: item_bytes].tolist()
    again = np.empty_like(chunk)
    join(planes, again)
    assert again.tolist() == chunk.tolist()


@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
def test_is_a_chunk_restored_from_its_difference(item_bytes: int) -> None:
    size = BLOCK_BYTES * 2 + 40 * item_bytes
    chunk, base = random_bytes(size), random_bytes(size, seed=1)
    changed = difference(chunk, base, item_bytes)
    assert restored(changed, base, item_bytes).tolist() == chunk.tolist()
    assert not difference(base, base, item_bytes).any()


def test_does_every_pattern_of_sixteen_bits_come_back() -> None:
    """Zeros of both signs, infinities, NaNs: against each other and against themselves."""
    patterns = np.arange(1 << 16, dtype="<u2").view(np.uint8)
    for shift in (0, 2, 2 * 0x7C00, 2 * 0x8000, 2 * 0xFFFF):
        base = np.roll(patterns, shift)
        assert np.array_equal(restored(difference(patterns, base, 2), base, 2), patterns)


def test_is_the_difference_of_neighbours_small() -> None:
    """One step up or down, for either sign and through zero, is a number below 4."""
    values = np.array([1.0, -1.0, 1e-30, -1e-30, 2.0, -2.0], dtype=np.float32)
    for towards in (np.inf, -np.inf):
        moved = np.nextafter(values, np.float32(towards))
        found = difference(moved.view(np.uint8), values.view(np.uint8), 4).view("<u4")
        assert found.max() < 4
    zeros = np.array([0.0, -0.0], dtype=np.float32)
    crossed = difference(zeros.view(np.uint8), zeros[::-1].copy().view(np.uint8), 4)
    assert crossed.view("<u4").max() < 4


DTYPES = ["uint8", "int8", "bool", "float16", "uint16", "float32", "int64", "float64", "complex64"]
TENSORS = st.dictionaries(
    st.text("abcdef.", min_size=1, max_size=4),
    st.tuples(st.sampled_from(DTYPES), st.integers(0, 3000), st.sampled_from(["noise", "alike"])),
    min_size=1,
    max_size=6,
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(told=TENSORS, changed=st.integers(0, 200), threads=st.sampled_from([1, 3]))
def test_does_any_object_survive(
    tmp_path: Path, told: dict[str, tuple[str, int, str]], changed: int, threads: int
) -> None:
    tensors = {
        name: (random_bytes(items, items) if kind == "noise" else np.arange(items) // 50).astype(d)
        for name, (d, items, kind) in told.items()
    }
    placed, base = image_of(tensors)
    image = base.copy()
    start = len(placed.header)
    if len(image) > start:
        places = np.random.default_rng(changed).integers(start, len(image), changed)
        image[places] ^= 0x55
    write_object(tmp_path, base)
    for against in (None, base):
        path = write_pack(tmp_path, placed, image, against, threads=threads)
        assert unpacked(path, len(image), threads=threads) == image.tobytes()


def several_chunks(seed: int = 0, drift: float = 0.0) -> tuple[Layout, Bytes]:
    return image_of(weights(seed, CHUNK_BYTES // 4 * 3 + 77, drift=drift))


def test_are_many_chunks_read_alike_in_any_order_and_by_any_threads(tmp_path: Path) -> None:
    placed, image = several_chunks()
    alone, together = (tmp_path / name for name in ("alone", "together"))
    for folder, threads in ((alone, 1), (together, 4)):
        folder.mkdir()
        write_pack(folder, placed, image, threads=threads)
    paths = [next(folder.iterdir()) for folder in (alone, together)]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    digest = digest_of(image)
    with packed_content(RealFileSystem(), str(alone), digest, len(image)) as content:
        assert content.digest(threads=3) == content.digest(threads=1) == digest
        for start, length in ((0, 10), (4000, 9000), (CHUNK_BYTES + 4090, CHUNK_BYTES + 20)):
            found = content.read(start, length).tobytes()
            assert found == image[start : start + length].tobytes()


def test_is_noise_stored_raw() -> None:
    placed, image = image_of({"noise": random_bytes(300_000).view(np.float32)})
    chosen = plan(placed, image, None, Compressors(1))
    assert [way.compressed for way in chosen.ways[1:]] == [(False,) * 4]
    assert chosen.estimated_bytes > 0.98 * len(image) - len(placed.header)


def test_are_only_the_planes_compressed_that_shrink() -> None:
    placed, image = image_of(weights(0))
    chosen = plan(placed, image, None, Compressors(1))
    assert chosen.ways[1].compressed == (False, False, False, True)


def test_is_a_base_taken_where_it_gains_and_left_where_it_does_not() -> None:
    placed, image = image_of(weights(0))
    near, far = image_of(weights(0, drift=0.1))[1], image_of(weights(7))[1]
    assert plan(placed, image, near, Compressors(1)).needs_base
    assert not plan(placed, image, far, Compressors(1)).needs_base


def test_is_an_equal_header_alone_no_reason_for_a_base() -> None:
    """Headers of one shard are equal: that gain must not bind two objects to each other."""
    placed, image = image_of({"noise": random_bytes(400_000)})
    other = image_of({"noise": random_bytes(400_000, seed=1)})[1]
    assert not plan(placed, image, other, Compressors(1)).needs_base


def test_is_the_estimate_near_what_comes_out(tmp_path: Path) -> None:
    placed, image = several_chunks(drift=0.1)
    base = several_chunks()[1]
    write_object(tmp_path, base)
    for against in (None, base):
        told = plan(placed, image, against, Compressors(1)).estimated_bytes
        packed_bytes = write_pack(tmp_path, placed, image, against).stat().st_size
        assert told == pytest.approx(packed_bytes, rel=0.03)


def test_do_segments_cover_an_object_of_many_small_tensors() -> None:
    specs = {f"t{number:05}": TensorSpec(dtype="F32", shape=(3,)) for number in range(5000)}
    placed = build_layout(specs)
    segments = segments_of(placed)
    assert len(segments) <= 2 + 5000 * 12 // (64 << 10)
    assert [s.start for s in segments[1:]] == [s.end for s in segments[:-1]]
    assert segments[-1].end == placed.size_bytes
    assert planes_at(segments) < 0.05 * placed.size_bytes


def test_do_segments_stay_below_the_limit_of_the_format() -> None:
    count = SEGMENTS_MAX + 10
    specs = {f"t{number:05}": TensorSpec(dtype="U8", shape=(64 << 10,)) for number in range(count)}
    assert len(segments_of(build_layout(specs))) < SEGMENTS_MAX


@pytest.mark.parametrize("level", [0, 20, -1, 1.0, "1", True])
def test_is_an_impossible_level_refused(level: int) -> None:
    with pytest.raises(UsageError, match="from 1 to 19"):
        Compressors(level)
