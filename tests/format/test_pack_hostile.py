"""Is every damaged or hostile packed file refused by its name, quickly and without memory?"""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash
import zstandard

from shardb.buffers import BufferPool, Bytes
from shardb.cache import ImageCache
from shardb.errors import CorruptionError, FormatError, ObjectCorruptError, ObjectMissingError
from shardb.filesystem import RealFileSystem
from shardb.pack_format import CHUNK_BYTES, HEADER_BYTES
from shardb.pack_reading import PackedObjects
from tests.support.packs import digest_of, image_of, weights, write_object, write_pack

SEGMENT_BYTES = 16
PLACED, BASE = image_of(weights(0))
IMAGE = image_of(weights(0, drift=0.1))[1]
DIGEST, SIZE = digest_of(IMAGE), len(IMAGE)
# What reading may take beyond the object itself, whatever a file says.
MEMORY_BYTES_MAX = 8 << 20


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A packed object that is a difference to another one, which is there too."""
    write_object(tmp_path, BASE)
    return write_pack(tmp_path, PLACED, IMAGE, BASE)


def read(directory: Path, digest: str = DIGEST, size_bytes: int = SIZE) -> Bytes:
    """Read an object as a store does, within the bounds of time and memory."""
    pool = BufferPool(1 << 20)
    objects = PackedObjects(RealFileSystem(), str(directory), pool, ImageCache(pool, 1 << 20))
    tracemalloc.start()
    began = time.monotonic()
    try:
        return objects.open(digest, size_bytes)[1]
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MEMORY_BYTES_MAX
        assert time.monotonic() - began < 5


def signed(data: bytes) -> bytes:
    """A file whose header has the checksum that it should have."""
    count = struct.unpack_from("<I", data, 12)[0]
    rows = data[HEADER_BYTES : HEADER_BYTES + SEGMENT_BYTES * count]
    planes = 0
    for at in range(0, len(rows) - SEGMENT_BYTES + 1, SEGMENT_BYTES):
        size, item_bytes = struct.unpack_from("<QB", rows, at)
        planes += -(-size // CHUNK_BYTES) * item_bytes
    tables = data[HEADER_BYTES : HEADER_BYTES + len(rows) + 4 * planes]
    front = data[:24] + bytes(8) + data[32:HEADER_BYTES]
    checksum = xxhash.xxh3_64_intdigest(front + tables)
    return data[:24] + struct.pack("<Q", checksum) + data[32:]


def patched(path: Path, offset: int, value: bytes, *, sign: bool = True) -> None:
    """Write `value` into a file at `offset`; the header's checksum is made to fit."""
    data = path.read_bytes()
    data = data[:offset] + value + data[offset + len(value) :]
    path.write_bytes(signed(data) if sign else data)


def check_refused(
    path: Path, match: str = "packed form", kind: type[CorruptionError] = ObjectCorruptError
) -> None:
    with pytest.raises(kind, match=match) as caught:
        read(path.parent)
    assert str(path) in str(caught.value)


def test_is_an_honest_file_let_through(packed: Path) -> None:
    assert read(packed.parent).tobytes() == IMAGE.tobytes()
    packed.write_bytes(signed(packed.read_bytes()))
    assert read(packed.parent).tobytes() == IMAGE.tobytes()


def test_is_a_flipped_bit_anywhere_refused(packed: Path) -> None:
    data = packed.read_bytes()
    tables_end = HEADER_BYTES + 2 * SEGMENT_BYTES + 4 * 5
    spread = np.linspace(tables_end, len(data) - 1, 60).astype(int)
    for offset in [*range(tables_end), *spread]:
        changed = bytearray(data)
        changed[offset] ^= 0x10
        packed.write_bytes(changed)
        with pytest.raises((ObjectCorruptError, FormatError, ObjectMissingError)):
            read(packed.parent)


def test_is_a_file_cut_anywhere_refused(packed: Path) -> None:
    data = packed.read_bytes()
    for length in [*range(140), *np.linspace(140, len(data) - 1, 40).astype(int)]:
        packed.write_bytes(data[:length])
        check_refused(packed)


def test_are_bytes_behind_the_end_refused(packed: Path) -> None:
    packed.write_bytes(packed.read_bytes() + b"x")
    check_refused(packed, "its planes end at byte")


@pytest.mark.parametrize(
    ("offset", "value", "match"),
    [
        pytest.param(0, b"SHARDBPK", "does not begin", id="magic"),
        pytest.param(8, b"\0\0", "version 0", id="version 0"),
        pytest.param(10, b"\1\0", "reserved 1", id="reserved"),
        pytest.param(12, struct.pack("<I", 0), "0 segments", id="no segment"),
        pytest.param(12, struct.pack("<I", 1 << 31), "segments", id="segments without end"),
        pytest.param(12, struct.pack("<I", 60_000), "too few", id="more segments than bytes"),
        pytest.param(16, struct.pack("<Q", 1 << 60), "holds object", id="a large object"),
        pytest.param(32, bytes(16), "holds object", id="another object"),
        pytest.param(64, struct.pack("<Q", 0), "segment 0 has 0", id="an empty segment"),
        pytest.param(64, struct.pack("<Q", 1 << 63), "segment 0 has", id="a segment without end"),
        pytest.param(64, struct.pack("<Q", 4095), "segments end", id="a hole at the end"),
        pytest.param(72, b"\3", "no known kind", id="items of 3 bytes"),
        pytest.param(72, b"\0", "no known kind", id="items of no bytes"),
        pytest.param(73, b"\2", "no known kind", id="a third way"),
        pytest.param(74, b"\1", "no known kind", id="a reserved byte"),
    ],
)
def test_is_a_header_that_cannot_be_refused(
    packed: Path, offset: int, value: bytes, match: str
) -> None:
    patched(packed, offset, value, sign=False)
    check_refused(packed, match)


def test_is_a_newer_version_told_apart_from_damage(packed: Path) -> None:
    patched(packed, 8, b"\2\0")
    check_refused(packed, "newer than this program", kind=FormatError)


def test_is_a_header_of_another_checksum_refused(packed: Path) -> None:
    patched(packed, 24, bytes(8), sign=False)
    check_refused(packed, "checksum")


def lengths_at(path: Path) -> int:
    return HEADER_BYTES + SEGMENT_BYTES * int(struct.unpack_from("<I", path.read_bytes(), 12)[0])


@pytest.mark.parametrize("length", [0, 1 << 20, (1 << 32) - 1])
def test_is_a_plane_of_impossible_length_refused(packed: Path, length: int) -> None:
    patched(packed, lengths_at(packed), struct.pack("<I", length))
    check_refused(packed, "longer than it is, or not at all")


def replace_first_plane(path: Path, make: Callable[[bytes], bytes]) -> None:
    """Put another frame in the place of the first plane, and say so in the header."""
    data, at = path.read_bytes(), lengths_at(path)
    count = sum(-(-s // CHUNK_BYTES) * i for s, i in _segments(data))
    start = at + 4 * count
    length = struct.unpack_from("<I", data, at)[0]
    plane = make(data[start : start + length])
    head = data[:at] + struct.pack("<I", len(plane)) + data[at + 4 : start]
    path.write_bytes(signed(head + plane + data[start + length :]))


def _segments(data: bytes) -> list[tuple[int, int]]:
    count = struct.unpack_from("<I", data, 12)[0]
    places = range(HEADER_BYTES, HEADER_BYTES + SEGMENT_BYTES * count, SEGMENT_BYTES)
    return [struct.unpack_from("<QB", data, at) for at in places]


def bomb(_: bytes) -> bytes:
    """A frame of a few hundred bytes that unpacks to 64 MiB."""
    return zstandard.ZstdCompressor().compress(bytes(64 << 20))[:4000]


def bomb_of_no_told_size(_: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 << 20))[:4000]


def wide_window(_: bytes) -> bytes:
    """The beginning of a frame of the right size that asks for a window of 512 MiB."""
    front = b"\x28\xb5\x2f\xfd\x80\x98" + struct.pack("<I", 4096)
    return front + (4096 << 3 | 3).to_bytes(3, "little")


@pytest.mark.parametrize(
    "make",
    [
        bomb,
        bomb_of_no_told_size,
        wide_window,
        pytest.param(lambda plane: b"\0" * len(plane), id="zeros"),
        pytest.param(lambda plane: plane + plane, id="two frames"),
        pytest.param(lambda plane: plane + b"x", id="more behind the frame"),
        pytest.param(lambda plane: plane[:-1], id="a frame cut short"),
        pytest.param(lambda _: zstandard.compress(bytes(4095)), id="a shorter plane"),
        pytest.param(lambda _: zstandard.compress(bytes(4097)), id="a longer plane"),
    ],
)
def test_is_a_frame_refused_that_is_not_the_plane(
    packed: Path, make: Callable[[bytes], bytes]
) -> None:
    replace_first_plane(packed, make)
    check_refused(packed, "damaged")


def test_is_another_plane_of_the_right_length_refused(packed: Path) -> None:
    """What no header can tell is told by the digest of what comes out."""
    replace_first_plane(packed, lambda _: zstandard.compress(bytes([1]) * 4096))
    check_refused(packed, "unpacked, the bytes have digest")


def test_is_another_base_of_the_right_size_refused(packed: Path) -> None:
    other = image_of(weights(0, drift=0.3))[1]
    patched(packed, 48, bytes.fromhex(write_object(packed.parent, other)))
    check_refused(packed, "or its base")


def test_is_a_damaged_base_refused(packed: Path) -> None:
    base = packed.parent / f"{digest_of(BASE)}.safetensors"
    data = bytearray(base.read_bytes())
    data[5000] ^= 1
    base.write_bytes(data)
    check_refused(packed, "or its base")


def test_is_a_base_cut_short_refused(packed: Path) -> None:
    base = packed.parent / f"{digest_of(BASE)}.safetensors"
    base.write_bytes(base.read_bytes()[:4096])
    with pytest.raises(ObjectCorruptError, match="ends at byte"):
        read(packed.parent)


def test_is_a_missing_base_named(packed: Path) -> None:
    (packed.parent / f"{digest_of(BASE)}.safetensors").unlink()
    check_refused(packed, digest_of(BASE), kind=ObjectMissingError)


def test_is_a_difference_without_a_base_refused(packed: Path) -> None:
    patched(packed, 48, bytes(16))
    check_refused(packed, "names no base")


def chain(directory: Path, length: int) -> tuple[str, int]:
    """Packed files that are each a difference to the one before; the digest of the last."""
    images = [image_of(weights(0, drift=step / 20))[1] for step in range(length)]
    write_pack(directory, PLACED, images[0])
    for base, image in pairwise(images):
        write_pack(directory, PLACED, image, base)
    assert not list(directory.glob("*.safetensors"))
    return digest_of(images[-1]), len(images[-1])


def test_is_a_chain_of_four_read(tmp_path: Path) -> None:
    digest, size_bytes = chain(tmp_path, 4)
    assert digest_of(read(tmp_path, digest, size_bytes)) == digest


def test_is_a_chain_of_five_refused(tmp_path: Path) -> None:
    digest, size_bytes = chain(tmp_path, 5)
    with pytest.raises(ObjectCorruptError, match="more than 4 packed files"):
        read(tmp_path, digest, size_bytes)


def test_is_a_circle_refused(packed: Path) -> None:
    (packed.parent / f"{digest_of(BASE)}.safetensors").unlink()
    path = write_pack(packed.parent, PLACED, BASE, IMAGE)
    assert path != packed
    with pytest.raises(ObjectCorruptError, match="more than 4 packed files"):
        read(packed.parent)


def test_does_any_file_end_in_an_error_of_ours(packed: Path) -> None:
    """Bytes at random places, with a header that claims to be whole."""
    data, source = packed.read_bytes(), np.random.default_rng(5)
    for _ in range(150):
        changed = bytearray(data)
        for _ in range(source.integers(1, 6)):
            changed[source.integers(8, 160)] = source.integers(0, 256)
        packed.write_bytes(signed(bytes(changed)) if source.random() < 0.7 else bytes(changed))
        with suppress(CorruptionError):
            assert read(packed.parent).tobytes() == IMAGE.tobytes()
