"""A disk in user space (FUSE) that loses what was not synced when its power is cut.

Owns the file system: files lie in a directory on a RAM disk, and every change is noted as the
crash explorer notes it (`shardb.testing.disk`). Whoever asks for the file `.cut-SEED` cuts the
power: what a disk may hold then is drawn and written into another directory, and nothing works any
more. Knows nothing of stores. Unlike the recording file system it sees the operating system's own
calls: of any process, and of the library that keeps the index.
"""

from __future__ import annotations

import ctypes.util
import errno
import importlib
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardb.testing.disk import DiskState
from shardb.testing.images import ImageLimits, choices
from shardb.testing.operations import Kind, Operation
from tools.crash_devices import SkippedError, unmount_for_certain

CUT_PREFIX = "/.cut-"
LIMITS = ImageLimits(exhaustive_operations=3, random_subsets=8)
MOUNT_SECONDS_MAX = 20.0
STATUS_KEYS = (
    *("st_atime", "st_ctime", "st_gid", "st_mode", "st_mtime", "st_nlink", "st_size", "st_uid"),
    *("st_ino", "st_blocks"),
)


def require() -> Any:
    """The module that speaks to the kernel; SkippedError says why there is none."""
    if not os.path.exists("/dev/fuse"):
        raise SkippedError("/dev/fuse is not there: the kernel has no FUSE")
    if os.getuid() != 0:
        raise SkippedError("only root can mount a file system here")
    if not any(ctypes.util.find_library(name) for name in ("fuse3", "fuse")):
        raise SkippedError("libfuse is not installed (Debian: libfuse3-3)")
    try:
        return importlib.import_module("mfusepy")  # of an extra that nothing else needs
    except (ImportError, OSError) as error:
        raise SkippedError(f"mfusepy cannot be used: {error}; pip install '.[fuse]'") from error


class LossyDisk:
    """The operations of the file system, called one at a time."""

    def __init__(self, place: Path, after: Path, *, lies: bool = False) -> None:
        """Serve the files of `place`; a cut writes what is left into `after`.

        With `lies` the disk reports each sync as done, and does none.
        """
        self._place = place
        self._after = after
        self._lies = lies
        self._is_cut = False
        self._number = 0
        tree = {
            path.relative_to(place).as_posix(): None if path.is_dir() else path.read_bytes()
            for path in place.rglob("*")
        }
        self._state = DiskState(tree)
        self._inodes = dict(self._state.entries)
        self._next_inode = max(self._inodes.values(), default=0) + 1
        self._open: dict[int, int] = {}

    # What is noted

    def _note(self, kind: Kind, path: str, **more: Any) -> None:
        self._state.advance(Operation(number=self._number, kind=kind, path=path[1:], **more))
        self._number += 1

    def _real(self, path: str) -> str:
        if self._is_cut:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return f"{self._place}{path}"

    def _new_inode(self, path: str) -> int:
        self._inodes[path[1:]] = self._next_inode
        self._next_inode += 1
        return self._next_inode - 1

    def _cut(self, seed: int) -> None:
        draw = random.Random(seed)
        found = list(choices(self._state, limits=LIMITS, seed=seed))
        _, choice = draw.choice(found)
        self._state.image(choice).materialise(str(self._after))
        self._is_cut = True

    # Files

    def create(self, path: str, mode: int, _: object = None) -> int:
        file = os.open(self._real(path), os.O_RDWR | os.O_CREAT, mode)
        if path[1:] not in self._inodes:
            self._note(Kind.CREATE, path, inode=self._new_inode(path))
        self._open[file] = self._inodes[path[1:]]
        return file

    def open(self, path: str, flags: int) -> int:
        writes = flags & os.O_ACCMODE != os.O_RDONLY
        file = os.open(self._real(path), os.O_RDWR if writes else os.O_RDONLY)
        self._open[file] = self._inodes[path[1:]]
        return file

    def release(self, path: str, file: int) -> int:
        self._open.pop(file, None)
        os.close(file)
        return 0

    def read(self, path: str, size: int, offset: int, file: int) -> bytes:
        self._real(path)
        return os.pread(file, size, offset)

    def write(self, path: str, data: bytes, offset: int, file: int) -> int:
        self._real(path)
        count = os.pwrite(file, data, offset)
        self._note(
            Kind.WRITE, path, inode=self._open[file], offset=offset, data=bytes(data[:count])
        )
        return count

    def truncate(self, path: str, length: int, file: int | None = None) -> int:
        os.truncate(self._real(path) if file is None else file, length)
        inode = self._inodes[path[1:]] if file is None else self._open[file]
        self._note(Kind.TRUNCATE, path, inode=inode, length=length)
        return 0

    def fsync(self, path: str, datasync: int, file: int) -> int:
        self._real(path)
        if not self._lies:
            self._note(Kind.SYNC, path, inode=self._open[file])
        return 0

    def flush(self, path: str, file: int) -> int:
        return 0

    # Directories

    def getattr(self, path: str, file: int | None = None) -> dict[str, Any]:
        if path.startswith(CUT_PREFIX):
            self._cut(int(path.removeprefix(CUT_PREFIX)))
        # The mount point itself is there as long as it is mounted.
        real = str(self._place) if path == "/" else self._real(path)
        status = os.lstat(real) if file is None else os.fstat(file)
        return {key: getattr(status, key) for key in STATUS_KEYS}

    def readdir(self, path: str, file: int) -> list[str]:
        return [".", "..", *os.listdir(self._real(path))]

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._real(path), mode)
        self._inodes[path[1:]] = 0
        self._note(Kind.MAKE_DIRECTORY, path)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._real(path))
        self._inodes.pop(path[1:])
        self._note(Kind.REMOVE_DIRECTORY, path)
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self._real(path))
        self._inodes.pop(path[1:])
        self._note(Kind.UNLINK, path)
        return 0

    def rename(self, old: str, new: str) -> int:
        os.rename(self._real(old), self._real(new))
        source, target = old[1:], new[1:]
        for name in [n for n in self._inodes if n == source or n.startswith(f"{source}/")]:
            self._inodes[target + name[len(source) :]] = self._inodes.pop(name)
        self._note(Kind.RENAME, old, target=target)
        return 0

    def fsyncdir(self, path: str, datasync: int, file: int) -> int:
        self._real(path)
        if not self._lies:
            self._note(Kind.SYNC_DIRECTORY, path)
        return 0

    # What changes nothing that a crash shows

    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._real(path), mode)
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        os.utime(self._real(path), ns=times or (time.time_ns(),) * 2)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._real(path))
        names = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_files", "f_ffree", "f_frsize")
        return {name: getattr(found, name) for name in (*names, "f_namemax")}


@contextmanager
def served(place: Path, disk: LossyDisk) -> Iterator[Path]:
    """Mount a disk at `place` for the length of a block, served by a process of its own."""
    fuse = require()
    place.mkdir(exist_ok=True)
    server = os.fork()
    if server == 0:
        _serve(fuse, place, disk)
    try:
        deadline = time.monotonic() + MOUNT_SECONDS_MAX
        while not os.path.ismount(place):
            if os.waitpid(server, os.WNOHANG)[0] or time.monotonic() > deadline:
                raise SkippedError("mounting with FUSE is refused here")
            time.sleep(0.01)
        yield place
    finally:
        if os.path.ismount(place):
            unmount_for_certain(place)
            os.waitpid(server, 0)


def _serve(fuse: Any, place: Path, disk: LossyDisk) -> None:
    """In a process of its own: answer the kernel until the file system is unmounted."""
    code = 1
    try:
        names = [name for name in vars(LossyDisk) if not name.startswith("_")]
        calls = {name: getattr(disk, name) for name in names}
        operations = type(
            "Served", (fuse.Operations,), {n: staticmethod(c) for n, c in calls.items()}
        )
        options = {"foreground": True, "nothreads": True, "hard_remove": True, "fsname": "lossy"}
        fuse.FUSE(operations(), str(place), **options)
        code = 0
    finally:
        os._exit(code)
