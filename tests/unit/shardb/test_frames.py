"""Is a frame read exactly when every bit of it is as it was written?"""

from __future__ import annotations

import struct

import pytest
import xxhash

from shardb import frames
from shardb.errors import LogDamagedError

PREVIOUS = bytes(range(16))
PAYLOAD = b"a record"


def frame(lsn: int = 5, payload: bytes = PAYLOAD) -> bytes:
    return frames.encode(lsn=lsn, previous=PREVIOUS, payload=payload)[0]


def test_does_a_frame_come_back_as_it_was() -> None:
    data, digest = frames.encode(lsn=5, previous=PREVIOUS, payload=PAYLOAD)
    found = frames.decode(memoryview(data), 0)
    assert found == frames.Frame(lsn=5, previous=PREVIOUS, digest=digest, payload=PAYLOAD, offset=0)
    assert found.end == len(data) == frames.HEADER_BYTES + len(PAYLOAD)


def test_are_the_fields_where_the_table_says() -> None:
    data, digest = frames.encode(lsn=5, previous=PREVIOUS, payload=PAYLOAD)
    assert frames.HEADER_BYTES == 56
    assert data[0:4] == b"SDBW"
    assert struct.unpack("<I", data[4:8]) == (len(PAYLOAD),)
    assert struct.unpack("<Q", data[8:16]) == (5,)
    assert data[16:32] == PREVIOUS
    assert data[32:40] == bytes(8)
    assert data[40:56] == digest == xxhash.xxh3_128_digest(data[:40] + PAYLOAD)
    assert data[56:] == PAYLOAD


def test_is_every_flipped_bit_noticed() -> None:
    data = frame()
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        assert frames.decode(memoryview(damaged), 0) is None, f"bit {bit}"


def test_is_every_missing_byte_noticed() -> None:
    data = frame()
    for length in range(len(data)):
        assert frames.decode(memoryview(data[:length]), 0) is None, f"{length} bytes"


def test_is_a_frame_read_at_its_place_only() -> None:
    data = memoryview(b"xyz" + frame() + b"tail")
    found = frames.decode(data, 3)
    assert found is not None
    assert found.offset == 3
    assert all(frames.decode(data, offset) is None for offset in range(len(data)) if offset != 3)


def test_is_a_frame_without_payload_a_frame() -> None:
    found = frames.decode(memoryview(frame(payload=b"")), 0)
    assert found is not None
    assert found.payload == b""


def resealed(data: bytes, offset: int, field: bytes) -> memoryview:
    """A frame with one field replaced and the digest made right again."""
    changed = bytearray(data)
    changed[offset : offset + len(field)] = field
    changed[40:56] = xxhash.xxh3_128_digest(bytes(changed[:40]) + bytes(changed[56:]))
    return memoryview(changed)


@pytest.mark.parametrize(
    ("offset", "field"),
    [(0, b"SDBX"), (8, bytes(8)), (32, b"\x01"), (4, b"\xff\xff\xff\xff"), (4, b"\x09")],
    ids=["magic", "lsn zero", "reserved", "length beyond the file", "length one too many"],
)
def test_is_a_forged_header_refused(offset: int, field: bytes) -> None:
    assert frames.decode(resealed(frame(), offset, field), 0) is None
    assert frames.decode(resealed(frame(), 0, b"SDBW"), 0) is not None


@pytest.mark.parametrize(
    ("lsn", "previous", "payload_bytes"),
    [(0, PREVIOUS, 1), (1, b"short", 1), (1, PREVIOUS, frames.PAYLOAD_LIMIT_BYTES + 1)],
)
def test_is_a_wrong_frame_never_written(lsn: int, previous: bytes, payload_bytes: int) -> None:
    class Long(bytes):
        def __len__(self) -> int:
            return payload_bytes

    with pytest.raises(AssertionError):
        frames.encode(lsn=lsn, previous=previous, payload=Long(b"x"))


def test_is_the_first_valid_frame_behind_garbage_found() -> None:
    garbage = b"SDBW" * 9 + b"\x00" * 5
    data = memoryview(garbage + frame(lsn=7) + frame(lsn=8))
    found = frames.find_valid(data, 1)
    assert found is not None
    assert (found.lsn, found.offset) == (7, len(garbage))
    behind = frames.find_valid(data, found.offset + 1)
    assert behind is not None
    assert behind.lsn == 8
    assert frames.find_valid(data, behind.offset + 1) is None


def test_is_the_search_of_a_hostile_log_bounded() -> None:
    """Every header promises a payload up to the end: digesting each promise would take hours."""
    header = struct.pack("<4sIQ16s8s16s", b"SDBW", 0, 1, bytes(16), bytes(8), bytes(16))
    count = (4 << 20) // len(header)
    data = bytearray(header * count)
    for number in range(count):
        promised = len(data) - (number + 1) * len(header)
        struct.pack_into("<I", data, number * len(header) + 4, promised)
    with pytest.raises(LogDamagedError, match="no log that was written here"):
        frames.find_valid(memoryview(data), 1)
