"""Writing one packed file, and proving that the object comes out of it again.

Owns the staged file from its first byte until it is whole, synced and verified. Knows nothing of
the log: what makes it the object's file is the caller's affair.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from shardb.buffers import BufferPool, Bytes
from shardb.filesystem import CREATE, EXCLUSIVE, WRITE, opened, write_all
from shardb.pack_codec import Compressors, Plan, packed_chunks
from shardb.pack_format import Header, encode_header
from shardb.pack_reading import check_unpacked, packed_content
from shardb.pack_threads import threads_here
from shardb.store import Store
from shardb.transfer_source import CHUNK_BYTES, file_digest


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedPack:
    """A packed file that is durable and verified, and has not its name yet."""

    path: str
    bytes: int
    file_digest: str


@dataclass(frozen=True, kw_only=True)
class Base:
    """The object that another one is a difference to, in memory."""

    digest: str
    step: int
    image: Bytes


def write_packed(
    store: Store,
    path: str,
    digest: str,
    image: Bytes,
    chosen: Plan,
    base: Base | None,
    compressors: Compressors,
) -> StagedPack:
    """Write the packed form of an object to a new file, sync it, unpack it again and compare.

    The file is gone when this fails. Raises OSError, ObjectCorruptError, or StorageFailedError
    after a failed sync.
    """
    files = store.files
    try:
        with opened(files, path, WRITE | CREATE | EXCLUSIVE) as file:
            size_bytes = _write_planes(store, file, digest, image, chosen, base, compressors)
            try:
                files.fdatasync(file)
            except OSError as error:
                raise store.appender.fail(store.appender.error("packing", error)) from error
        _verify(store, path, digest, len(image))
        told = file_digest(files, path, size_bytes, BufferPool(CHUNK_BYTES))
    except BaseException:
        with suppress(OSError):
            files.unlink(path)
        raise
    return StagedPack(path=path, bytes=size_bytes, file_digest=told)


def _write_planes(
    store: Store,
    file: int,
    digest: str,
    image: Bytes,
    chosen: Plan,
    base: Base | None,
    compressors: Compressors,
) -> int:
    """Write planes, then the header that makes them a packed file; return its size in bytes."""
    at = chosen.planes_at
    lengths: list[int] = []
    base_image = base.image if base is not None else None
    for planes in packed_chunks(chosen, image, base_image, compressors, threads=threads_here()):
        data = b"".join(planes)
        write_all(store.files, file, data, at)
        lengths += [len(plane) for plane in planes]
        at += len(data)
    header = Header(
        digest=digest,
        base=base.digest if base is not None else None,
        bytes=len(image),
        segments=chosen.segments,
        lengths=np.array(lengths, dtype=np.uint32),
    )
    write_all(store.files, file, encode_header(header), 0)
    return at


def _verify(store: Store, path: str, digest: str, size_bytes: int) -> None:
    """Unpack a file as every reader will, from the base that has a name in the store."""
    directory = store.objects.directory
    with packed_content(store.files, directory, digest, size_bytes, path=path) as content:
        check_unpacked(path, content.header, content.digest(threads=threads_here()))
