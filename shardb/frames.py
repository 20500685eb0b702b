"""The frame format of the write-ahead log, shared by its reader and its writer.

A frame is a 56-byte header and a msgpack payload:

    offset  bytes  field
         0      4  magic "SDBW"
         4      4  payload length, unsigned little-endian
         8      8  log sequence number (LSN), unsigned little-endian
        16     16  digest of the previous frame (zero for LSN 1)
        32      8  reserved, zero
        40     16  digest: xxh3-128 over header bytes 0 to 39 and the payload
        56      n  payload

The digest of the previous frame chains the log: a frame cannot be left out, moved or replaced
without breaking every later one. Knows nothing of segments, files or what a payload means.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from shardb.errors import LogDamagedError

MAGIC = b"SDBW"
HEADER = struct.Struct("<4sIQ16s8s16s")
HEADER_BYTES = HEADER.size
DIGESTED_BYTES = HEADER_BYTES - 16
PAYLOAD_LIMIT_BYTES = 1 << 30
NO_DIGEST = bytes(16)
# What a search for a record behind damage may digest: so many passes over its bytes, and a bit.
SEARCH_PASSES = 16
SEARCH_LIMIT_BYTES = 64 << 20
_RESERVED = bytes(8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """One frame as read: where it stood in its segment, and what it holds."""

    lsn: int
    previous: bytes
    digest: bytes
    payload: bytes
    offset: int

    @property
    def end(self) -> int:
        return self.offset + HEADER_BYTES + len(self.payload)


def encode(*, lsn: int, previous: bytes, payload: bytes) -> tuple[bytes, bytes]:
    """Return the frame's bytes and its digest."""
    assert lsn > 0
    assert len(previous) == 16
    assert len(payload) <= PAYLOAD_LIMIT_BYTES
    head = HEADER.pack(MAGIC, len(payload), lsn, previous, _RESERVED, NO_DIGEST)[:DIGESTED_BYTES]
    digest = frame_digest(head, payload)
    return head + digest + payload, digest


def decode(data: memoryview, offset: int) -> Frame | None:
    """Return the valid frame at `offset`, or None when there is none.

    Only the frame itself is checked; whether it continues the chain is the caller's question.
    """
    if offset + HEADER_BYTES > len(data):
        return None
    magic, length, lsn, previous, reserved, digest = HEADER.unpack_from(data, offset)
    start = offset + HEADER_BYTES
    if magic != MAGIC or reserved != _RESERVED or lsn == 0 or start + length > len(data):
        return None
    payload = bytes(data[start : start + length])
    if frame_digest(data[offset : offset + DIGESTED_BYTES], payload) != digest:
        return None
    return Frame(lsn=lsn, previous=previous, digest=digest, payload=payload, offset=offset)


def find_valid(data: memoryview, start: int) -> Frame | None:
    """Return the first valid frame that begins at or behind `start`, searching every byte.

    Raises LogDamagedError when so much looks like a header that digesting what each one promises
    would not end: nothing the store writes looks like that.
    """
    raw = bytes(data[start:])
    left_bytes = SEARCH_LIMIT_BYTES + SEARCH_PASSES * len(raw)
    position = raw.find(MAGIC)
    while position >= 0:
        frame = decode(data, start + position)
        if frame is not None:
            return frame
        promised_bytes = int.from_bytes(raw[position + 4 : position + 8], "little")
        left_bytes -= min(promised_bytes, len(raw) - position)
        if left_bytes < 0:
            raise LogDamagedError(
                f"more than {SEARCH_PASSES} passes over {len(raw)} bytes of log found no record in "
                "what looks like many; this is no log that was written here. Put the file back "
                "from a copy, or run `shardb repair`",
                offset=start,
            )
        position = raw.find(MAGIC, position + 1)
    return None


def frame_digest(head: bytes | memoryview, payload: bytes) -> bytes:
    """xxh3-128 over the first 40 header bytes and the payload."""
    hasher = xxhash.xxh3_128(head)
    hasher.update(payload)
    return hasher.digest()
