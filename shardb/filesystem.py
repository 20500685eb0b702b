"""The file seam: every file operation of the store goes through a `FileSystem`.

Owns the names of the operations and the real implementation. Knows nothing of the store. Errors are
plain `OSError`s; the store turns them into its own. LMDB does its own I/O below this seam and
reports each of its commits through `database_committed`, so that a simulated file system can keep
the images of the index that a crash may leave behind.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from shardb import attributes

READ = os.O_RDONLY
WRITE = os.O_RDWR
CREATE = os.O_CREAT
EXCLUSIVE = os.O_EXCL
DIRECT = getattr(os, "O_DIRECT", 0)
READ_PIECE_BYTES = 16 << 20

Buffer = bytes | bytearray | memoryview | mmap.mmap

# Magic numbers of statfs(2) for file systems whose locks or syncs the store cannot rely on.
NETWORK_FILE_SYSTEMS = {
    0x6969: "nfs",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x517B: "smb",
    0x01021997: "9p",
    0x00C36400: "ceph",
    0x5346414F: "afs",
    0x47504653: "gpfs",
    0x0BD00BD0: "lustre",
}
MEMORY_FILE_SYSTEMS = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}


class Stamp(NamedTuple):
    """A file at one moment: another one, or one that was written to since, has another stamp."""

    inode: int
    modified_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FileStatus:
    """What stat(2) says of a file: sizes in bytes, time in nanoseconds; `links` are its names.

    `owner` is a number, `mode` has the permissions alone.
    """

    size_bytes: int
    modified_ns: int
    inode: int
    device: int
    allocated_bytes: int
    is_directory: bool
    links: int = 1
    is_link: bool = False
    owner: int = 0
    mode: int = 0o644

    @property
    def is_shared(self) -> bool:
        """Say whether whoever writes to the file may write to somebody else's too."""
        return self.is_link or self.links > 1

    @property
    def stamp(self) -> Stamp:
        """Give what changes when the file does."""
        return Stamp(self.inode, self.modified_ns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """Bytes free to this process, and bytes in all, on the file system of a path."""

    free_bytes: int
    total_bytes: int


class FileSystem(Protocol):
    """The operations the store is built from. All of them may raise `OSError`."""

    def open(self, path: str, flags: int, mode: int = 0o666) -> int: ...
    def close(self, file: int) -> None: ...
    def pread(self, file: int, length: int, offset: int) -> bytes: ...
    def pread_into(self, file: int, buffer: memoryview, offset: int) -> int: ...
    def pwrite(self, file: int, data: Buffer, offset: int) -> int: ...
    def fsync(self, file: int) -> None: ...
    def fdatasync(self, file: int) -> None: ...
    def truncate(self, file: int, length: int) -> None: ...
    def allocate(self, file: int, length: int, *, keep_size: bool) -> None: ...
    def map(self, file: int, length: int, *, writable: bool) -> mmap.mmap: ...
    def lock(self, file: int, *, exclusive: bool, blocking: bool) -> bool: ...
    def unlock(self, file: int) -> None: ...
    def lock_holder(self, path: str) -> str: ...
    def status(self, path: str) -> FileStatus: ...
    def is_immutable(self, path: str) -> bool: ...
    def can_rename(self, source: str, target: str) -> bool: ...
    def exists(self, path: str) -> bool: ...
    def list(self, path: str) -> list[str]: ...
    def make_directory(self, path: str) -> None: ...
    def remove_directory(self, path: str) -> None: ...
    def rename(self, source: str, target: str) -> None: ...
    def unlink(self, path: str) -> None: ...
    def sync_directory(self, path: str) -> None: ...
    def space(self, path: str) -> Space: ...
    def kind(self, path: str) -> str: ...
    def database_committed(self, path: str) -> None: ...


class RealFileSystem:
    """The operating system's files."""

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        # Without O_NONBLOCK a pipe in the place of a file would be waited for, for ever.
        file = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, mode)
        kind = os.fstat(file).st_mode
        if stat.S_ISREG(kind) or stat.S_ISDIR(kind):
            return file
        os.close(file)
        raise OSError(errno.ENXIO, os.strerror(errno.ENXIO), path)

    def close(self, file: int) -> None:
        os.close(file)

    def pread(self, file: int, length: int, offset: int) -> bytes:
        return os.pread(file, length, offset)

    def pread_into(self, file: int, buffer: memoryview, offset: int) -> int:
        return os.preadv(file, [buffer], offset)

    def pwrite(self, file: int, data: Buffer, offset: int) -> int:
        return os.pwrite(file, data, offset)

    def fsync(self, file: int) -> None:
        os.fsync(file)

    def fdatasync(self, file: int) -> None:
        os.fdatasync(file)

    def truncate(self, file: int, length: int) -> None:
        os.ftruncate(file, length)

    def allocate(self, file: int, length: int, *, keep_size: bool) -> None:
        _fallocate(file, length, keep_size=keep_size)

    def map(self, file: int, length: int, *, writable: bool) -> mmap.mmap:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return mmap.mmap(file, length, flags=mmap.MAP_SHARED, prot=access)

    def lock(self, file: int, *, exclusive: bool, blocking: bool) -> bool:
        """Take flock(2); False when it is held elsewhere and `blocking` is False."""
        mode = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        try:
            fcntl.flock(file, mode if blocking else mode | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self, file: int) -> None:
        fcntl.flock(file, fcntl.LOCK_UN)

    def lock_holder(self, path: str) -> str:
        """Who holds flock(2) on a file, for people: proc(5) lists locks by inode."""
        inode = f":{os.stat(path).st_ino} "
        try:
            with open("/proc/locks", encoding="ascii") as table:
                pids = [line.split()[4] for line in table if inode in line and "->" not in line]
        except OSError:
            pids = []
        return f"process {', '.join(pids)}" if pids else "another process"

    def status(self, path: str) -> FileStatus:
        found = os.stat(path)
        return FileStatus(
            size_bytes=found.st_size,
            modified_ns=found.st_mtime_ns,
            inode=found.st_ino,
            device=found.st_dev,
            allocated_bytes=found.st_blocks * 512,
            is_directory=stat.S_ISDIR(found.st_mode),
            links=found.st_nlink,
            is_link=os.path.islink(path),
            owner=found.st_uid,
            mode=stat.S_IMODE(found.st_mode),
        )

    def is_immutable(self, path: str) -> bool:
        return attributes.is_immutable(path)

    def can_rename(self, source: str, target: str) -> bool:
        return attributes.can_rename(source, target)

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def list(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def make_directory(self, path: str) -> None:
        os.mkdir(path)

    def remove_directory(self, path: str) -> None:
        os.rmdir(path)

    def rename(self, source: str, target: str) -> None:
        os.replace(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def sync_directory(self, path: str) -> None:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def space(self, path: str) -> Space:
        """What statvfs(3) says; ramfs counts nothing, and may take what memory there is."""
        stat = os.statvfs(path)
        if stat.f_blocks == 0:
            page_bytes = os.sysconf("SC_PAGE_SIZE")
            free, total = (os.sysconf(name) for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"))
            return Space(free_bytes=free * page_bytes, total_bytes=total * page_bytes)
        return Space(
            free_bytes=stat.f_bavail * stat.f_frsize, total_bytes=stat.f_blocks * stat.f_frsize
        )

    def kind(self, path: str) -> str:
        """`"network:nfs"`, `"memory:tmpfs"` or `"disk"`, by the magic number of statfs(2)."""
        magic = _statfs_magic(path)
        if magic in NETWORK_FILE_SYSTEMS:
            return f"network:{NETWORK_FILE_SYSTEMS[magic]}"
        if magic in MEMORY_FILE_SYSTEMS:
            return f"memory:{MEMORY_FILE_SYSTEMS[magic]}"
        return "disk"

    def database_committed(self, path: str) -> None:
        """Nothing to do on real files."""


def write_all(files: FileSystem, file: int, data: Buffer, offset: int) -> None:
    """Write every byte of `data` at `offset`, however short the single writes are.

    Raises OSError(ENOSPC) when a write makes no progress.
    """
    view = memoryview(data).cast("B")
    written_bytes = 0
    while written_bytes < len(view):
        count = files.pwrite(file, view[written_bytes:], offset + written_bytes)
        if count <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written_bytes += count


def read_exactly(files: FileSystem, file: int, length: int, offset: int) -> bytes:
    """Read `length` bytes at `offset`, or fewer when the file ends before."""
    parts: list[bytes] = []
    read_bytes = 0
    while read_bytes < length:
        # The buffer of a read is as large as what is asked for, not as what is there.
        asked = min(length - read_bytes, READ_PIECE_BYTES)
        part = files.pread(file, asked, offset + read_bytes)
        if not part:
            break
        parts.append(part)
        read_bytes += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_file(files: FileSystem, path: str, *, limit_bytes: int) -> bytes:
    """The whole content of a small file; OSError(EFBIG) when it is larger than `limit_bytes`."""
    with opened(files, path, READ) as file:
        try:
            data = read_exactly(files, file, limit_bytes + 1, 0)
        except IsADirectoryError as error:  # opening a directory for reading works
            raise IsADirectoryError(error.errno, error.strerror, path) from error
    if len(data) > limit_bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
    return data


def list_if_there(files: FileSystem, path: str) -> list[str]:
    """The names in a directory; none where there is no such directory."""
    try:
        return files.list(path)
    except FileNotFoundError:
        return []


def leads_nowhere(files: FileSystem, path: str) -> bool:
    """Whether a path is a link without an end, or to what is not there.

    A file that somebody makes at this moment is there when it is asked for again.
    """
    for _ in range(2):
        try:
            files.status(path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP) or not files.exists(path):
                return False
        else:
            return False
    return True


@contextmanager
def opened(files: FileSystem, path: str, flags: int) -> Iterator[int]:
    """Open for the length of a block."""
    file = files.open(path, flags)
    with closing(files, file, written=flags & WRITE != 0):
        yield file


def open_direct(files: FileSystem, path: str, flags: int) -> int | None:
    """Open past the page cache; None where the file system does not have that."""
    try:
        return files.open(path, flags | DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return None


@contextmanager
def closing(files: FileSystem, file: int, *, written: bool) -> Iterator[None]:
    """Close a descriptor after a block.

    What close says matters only where the file was `written` and the block went well: of a file
    that was read it says nothing about the bytes, and the error of a block must not be hidden.
    """
    try:
        yield
    except BaseException:
        close_quietly(files, file)
        raise
    if written:
        files.close(file)
    else:
        close_quietly(files, file)


def close_quietly(files: FileSystem, file: int) -> None:
    """Close a descriptor whose bytes nobody waits for: its end is the same whatever close says."""
    with suppress(OSError):
        files.close(file)


def write_file_durably(files: FileSystem, path: str, data: bytes) -> None:
    """Create or replace `path` atomically: written beside, synced, renamed, directory synced."""
    partial = f"{path}.partial"
    with opened(files, partial, WRITE | CREATE | os.O_TRUNC) as file:
        write_all(files, file, data, 0)
        files.fsync(file)
    files.rename(partial, path)
    files.sync_directory(os.path.dirname(path))


_FALLOC_FL_KEEP_SIZE = 1
_libc = ctypes.CDLL(None, use_errno=True)


def _fallocate(file: int, length: int, *, keep_size: bool) -> None:
    mode = _FALLOC_FL_KEEP_SIZE if keep_size else 0
    result = _libc.fallocate(file, mode, ctypes.c_int64(0), ctypes.c_int64(length))
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _statfs_magic(path: str) -> int:
    """The f_type field of struct statfs: its first long on Linux; 0 where it cannot be had."""
    buffer = ctypes.create_string_buffer(256)
    if _libc.statfs(os.fsencode(path), buffer) != 0:
        return 0
    return ctypes.c_ulong.from_buffer(buffer).value & 0xFFFFFFFF
