"""Checking objects: presence, size, digest and header, with bounded memory.

Owns how one object is read and judged, and the threads that read many. Knows nothing of the log or
the index: who needs an object is told by the caller.

Invariants: reads 8 MiB at a time a thread, past the page cache where the file system can, because
a good copy in memory says nothing about the disk; never maps an object, never writes.
"""

from __future__ import annotations

import errno
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace

import xxhash

from shardb import layout
from shardb.buffers import PAGE_BYTES, padded
from shardb.errors import (
    FormatError,
    ObjectCorruptError,
    ObjectMissingError,
    ShardbError,
    StorageFailedError,
)
from shardb.filesystem import READ, FileSystem, closing, leads_nowhere, open_direct
from shardb.objects import OBJECT_SUFFIX
from shardb.obstacles import LINK
from shardb.pack_reading import check_unpacked, packed_content, packed_path
from shardb.records import ShardEntry
from shardb.references import PackRow
from shardb.storage_errors import reason

READ_CHUNK_BYTES = 8 << 20
THREADS_MAX = 4
HEADER_LENGTH_BYTES = 8
ERROR_OF_KIND: dict[str, type[ShardbError]] = {
    "object_missing": ObjectMissingError,
    "object_unreadable": StorageFailedError,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectFault:
    """Why an object is not what was committed; `kind` is that of the finding.

    `error` is the number of what the operating system said, where it did not show the file.
    """

    kind: str
    path: str
    expected: str
    found: str
    offset: int | None = None
    error: int | None = None


def _unshown(files: FileSystem, fault: ObjectFault, error: OSError) -> ObjectFault:
    """A directory, or a link to itself, is no object; else the storage does not show it."""
    if error.errno in (errno.EISDIR, errno.ELOOP):
        found = error.strerror or str(error)
        return replace(fault, kind="object_missing", found=found)
    found = reason(files, error)
    return replace(fault, kind="object_unreadable", found=found, error=error.errno)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """An object to check: its digest, its size in bytes, and how it is packed, if it is."""

    digest: str
    bytes: int
    pack: PackRow | None = None

    @property
    def file_bytes(self) -> int:
        """Bytes of the file that is read."""
        return self.bytes if self.pack is None else self.pack.packed_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """An object that was checked, and what is wrong with it."""

    wanted: Wanted
    fault: ObjectFault | None


def object_path(root: str, digest: str) -> str:
    """Where the object of a digest lies."""
    return f"{root}/objects/{digest}{OBJECT_SUFFIX}"


def inspect_object(files: FileSystem, root: str, wanted: Wanted) -> ObjectFault | None:
    """Read one object to its end and judge it; None when it is as committed.

    Where its file is not there, the other one that it may have is: it is being packed or unpacked.
    """
    ways = [_inspect_image, _inspect_packed]
    first, other = ways if wanted.pack is None else reversed(ways)
    fault = first(files, root, wanted)
    if fault is None or fault.kind != "object_missing":
        return fault
    second = other(files, root, wanted)
    return fault if second is not None and second.kind == "object_missing" else second


def _inspect_packed(files: FileSystem, root: str, wanted: Wanted) -> ObjectFault | None:
    """A packed file is as it was when it was verified; one that the log has not told is unpacked.

    Its base is an object of its own, and is read by itself.
    """
    path = packed_path(f"{root}/objects", wanted.digest)
    if wanted.pack is not None:
        pack = wanted.pack
        return _compare(files, path, pack.packed_bytes, pack.file_digest.hex())[0]
    missing = ObjectFault(kind="object_missing", path=path, expected="a packed file", found="none")
    try:
        with packed_content(files, f"{root}/objects", wanted.digest, wanted.bytes) as content:
            check_unpacked(path, content.header, content.digest(threads=1))
    except FileNotFoundError:
        return missing
    except (FormatError, ObjectCorruptError, ObjectMissingError) as error:
        expected = f"digest {wanted.digest} when unpacked"
        return replace(missing, kind="object_corrupt", expected=expected, found=error.message)
    except OSError as error:
        return _unshown(files, missing, error)
    return None


def _inspect_image(files: FileSystem, root: str, wanted: Wanted) -> ObjectFault | None:
    path = object_path(root, wanted.digest)
    fault, header = _compare(files, path, wanted.bytes, wanted.digest)
    if fault is not None:
        return fault
    try:
        layout.parse_header(memoryview(header), wanted.bytes, path)
    except ObjectCorruptError as error:
        return ObjectFault(
            kind="object_malformed",
            path=path,
            expected="a safetensors header",
            found=error.message,
            offset=0,
        )
    return None


def _compare(
    files: FileSystem, path: str, size_bytes: int, digest: str
) -> tuple[ObjectFault | None, bytes]:
    """Compare a whole file with its size and digest; gives also what may be its header."""

    def fault(kind: str, expected: str, found: str, offset: int | None = None) -> ObjectFault:
        return ObjectFault(kind=kind, path=path, expected=expected, found=found, offset=offset)

    try:
        with _opened_direct(files, path) as file:
            actual_bytes = files.status(path).size_bytes
            actual_digest, header = _digest_and_header(files, file, actual_bytes)
    except FileNotFoundError:
        if leads_nowhere(files, path):  # what it leads to may be whole
            dangling = fault("object_unreadable", f"{size_bytes} bytes", LINK)
            return replace(dangling, error=errno.ENOENT), b""
        return fault("object_missing", f"{size_bytes} bytes", "no file"), b""
    except OSError as error:
        return _unshown(files, fault("", f"{size_bytes} bytes", ""), error), b""
    if actual_bytes != size_bytes:
        where = min(actual_bytes, size_bytes)
        told = (f"{size_bytes} bytes", f"{actual_bytes} bytes")
        return fault("object_corrupt", *told, where), b""
    if actual_digest != digest:
        return fault("object_corrupt", f"digest {digest}", f"digest {actual_digest}"), b""
    return None, header


def check_object(files: FileSystem, root: str, shard: str, entry: ShardEntry) -> None:
    """Raise ObjectMissingError or another CorruptionError unless the object is as committed.

    StorageFailedError where the storage does not show it.
    """
    fault = inspect_object(files, root, Wanted(digest=entry.digest, bytes=entry.bytes))
    if fault is None:
        return
    kind = ERROR_OF_KIND.get(fault.kind, ObjectCorruptError)
    raise kind(
        f"{fault.path}: shard {shard!r}: expected {fault.expected}, found {fault.found}; run "
        "`shardb fsck` to see which steps it hits",
        path=fault.path,
    )


def check_objects(
    files: FileSystem,
    root: str,
    wanted: Sequence[Wanted],
    *,
    deadline: float | None,
    on_checked: Callable[[Checked], None],
) -> bool:
    """Check many objects in the given order, a few at a time; False when the deadline came first.

    `deadline` is a moment of `time.monotonic()`. At least one object is checked.
    """
    with ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="shardb-fsck") as pool:
        waiting: set[Future[Checked]] = set()
        for position, item in enumerate(wanted):
            if position and deadline is not None and time.monotonic() >= deadline:
                _report(waiting, on_checked)
                return False
            waiting.add(pool.submit(_check, files, root, item))
            if len(waiting) >= THREADS_MAX:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                _report(done, on_checked)
        _report(waiting, on_checked)
    return True


def _check(files: FileSystem, root: str, wanted: Wanted) -> Checked:
    return Checked(wanted=wanted, fault=inspect_object(files, root, wanted))


def _report(done: set[Future[Checked]], on_checked: Callable[[Checked], None]) -> None:
    for future in done:
        on_checked(future.result())


@contextmanager
def _opened_direct(files: FileSystem, path: str) -> Iterator[int]:
    """Open for reading past the page cache, or through it where that cannot be."""
    file = open_direct(files, path, READ)
    if file is None:
        file = files.open(path, READ)
    with closing(files, file, written=False):
        yield file


def _digest_and_header(files: FileSystem, file: int, size_bytes: int) -> tuple[str, bytes]:
    """The digest of a whole file, and what its first bytes say is its header.

    Direct I/O wants memory, offsets and lengths in whole pages; only the end of a file may be odd.
    """
    piece_bytes = min(READ_CHUNK_BYTES, padded(max(size_bytes, 1)))
    hasher = xxhash.xxh3_128()
    header = bytearray()
    offset = 0
    with mmap.mmap(-1, piece_bytes) as memory, memoryview(memory) as buffer:
        while (count := files.pread_into(file, buffer, offset)) > 0:
            hasher.update(buffer[:count])
            if len(header) < (wanted := _header_bytes(header or buffer[:count])):
                header += buffer[: min(count, wanted - len(header))]
            offset += count
            if count % PAGE_BYTES:
                break
    return hasher.hexdigest(), bytes(header)


def _header_bytes(start: memoryview | bytearray) -> int:
    """How long a file's header says it is, itself included; never more than a header may be."""
    told = HEADER_LENGTH_BYTES + int.from_bytes(start[:HEADER_LENGTH_BYTES], "little")
    return min(told, layout.HEADER_LIMIT_BYTES)
