"""A file system that writes down every operation, can stop at one of them, and can fail.

Owns the log of a workload and the faults planted in it. The files themselves are real, in a
directory that should lie on a RAM disk. Knows nothing of the store. Operations that change
something are numbered from 0; reads, locks and closes are counted for faults and have no number.

The files of the index are not part of the log: their states are kept as `index_images`, and a crash
may leave any of them. Writable maps are not recorded either: they belong to stores that live in
memory only, whose files no power loss leaves behind.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from shardb.filesystem import DIRECT, Buffer, FileStatus, RealFileSystem, Space
from shardb.testing.disk import DiskState
from shardb.testing.operations import Crash, Fault, Kind, Operation

Ignore = Callable[[Operation], bool]
DATABASE_SUFFIX = ".mdb"


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """What a killed process has done to a disk that still runs, and the inodes of its files."""

    operations: Sequence[Operation]
    entries: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexImage:
    """The bytes of an index after one of its commits, which was operation `number`."""

    number: int
    path: str
    data: bytes


def ignore_nothing(_: Operation) -> bool:
    """Every sync does what it says."""
    return False


class RecordingFileSystem:
    """A FileSystem over `root`.

    `stop_at` is the number of the operation before which the machine stops; `ignore` names syncs
    that are reported as done and are not (the control arm of the crash tests: a store on such a
    disk must lose data). `kind` is what `kind` answers, so that a RAM disk can stand for a disk.
    `past` are the operations that led to what lies in `root`, when not all of it is durable.
    """

    def __init__(
        self,
        root: str,
        *,
        stop_at: int | None = None,
        fault: Fault | None = None,
        ignore: Ignore = ignore_nothing,
        kind: str = "disk",
        past: Past | None = None,
    ) -> None:
        self.root = os.path.realpath(root)
        self.operations: list[Operation] = list(past.operations) if past else []
        self.index_images: list[IndexImage] = []
        self.calls: Counter[str] = Counter()
        self.fired_count = 0
        self._matched_count = 0
        self._is_undisturbed = False
        self.stop_at = stop_at
        self.crashed = False
        self.initial = read_tree(self.root)
        self._fault = fault
        self._ignore = ignore
        self._kind = kind
        self._real = RealFileSystem()
        self._mutex = threading.RLock()
        self._disk = DiskState(self.initial)
        self._inodes = dict(past.entries if past else self._disk.entries)
        self._next_inode = max(self._inodes.values(), default=0) + 1
        if past:
            self._next_inode += max((o.inode for o in past.operations), default=0)
        self._open_files: dict[int, tuple[int, str]] = {}

    # Files.

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        with self._call("open", path):
            name = self._name(path)
            new = bool(flags & os.O_CREAT) and not os.path.lexists(path)
            if new:
                self._check_stop()
            # A RAM disk of an older kernel has no direct I/O; durability is simulated anyway.
            file = self._real.open(path, flags & ~DIRECT, mode)
            if new:
                self._inodes[name] = self._next_inode
                self._note(Kind.CREATE, name, inode=self._next_inode)
                self._next_inode += 1
            elif flags & os.O_TRUNC:
                self._note(Kind.TRUNCATE, name, inode=self._inodes[name])
            self._open_files[file] = (self._inodes.get(name, 0), name)
            return file

    def close(self, file: int) -> None:
        with self._mutex:
            # What `shut_down` has closed may be the number of somebody else's file by now.
            if self._open_files.pop(file, None) is not None:
                self._real.close(file)
        # A descriptor is gone even when close(2) fails, and even when the machine has stopped.
        if not self.crashed:
            with self._call("close"):
                pass

    def pread(self, file: int, length: int, offset: int) -> bytes:
        with self._call("pread", self._path(file)) as short:
            return self._real.pread(file, length if short is None else min(length, short), offset)

    def pread_into(self, file: int, buffer: memoryview, offset: int) -> int:
        with self._call("pread_into", self._path(file)) as short:
            return self._real.pread_into(file, buffer[:short], offset)

    def pwrite(self, file: int, data: Buffer, offset: int) -> int:
        with self._call("pwrite", self._path(file)) as short:
            self._check_stop()
            part = memoryview(data).cast("B")[:short]
            count = self._real.pwrite(file, part, offset)
            inode, name = self._open_files[file]
            self._note(Kind.WRITE, name, inode=inode, offset=offset, data=bytes(part[:count]))
            return count

    def fsync(self, file: int) -> None:
        self._sync("fsync", file)

    def fdatasync(self, file: int) -> None:
        self._sync("fdatasync", file)

    def truncate(self, file: int, length: int) -> None:
        with self._call("truncate", self._path(file)):
            self._check_stop()
            self._real.truncate(file, length)
            inode, name = self._open_files[file]
            self._note(Kind.TRUNCATE, name, inode=inode, length=length)

    def allocate(self, file: int, length: int, *, keep_size: bool) -> None:
        with self._call("allocate", self._path(file)):
            self._check_stop()
            self._real.allocate(file, length, keep_size=keep_size)
            inode, name = self._open_files[file]
            # Space that lies beyond the end of a file is nothing that a crash could show.
            if not keep_size:
                self._note(Kind.EXTEND, name, inode=inode, length=length)

    def map(self, file: int, length: int, *, writable: bool) -> mmap.mmap:
        with self._call("map", self._path(file)):
            return self._real.map(file, length, writable=writable)

    def lock(self, file: int, *, exclusive: bool, blocking: bool) -> bool:
        with self._call("lock", self._path(file)):
            pass  # Counted before, not while: waiting for a lock must not stop the other threads.
        return self._real.lock(file, exclusive=exclusive, blocking=blocking)

    def unlock(self, file: int) -> None:
        self._real.unlock(file)

    def lock_holder(self, path: str) -> str:
        return self._real.lock_holder(path)

    def is_immutable(self, path: str) -> bool:
        return self._real.is_immutable(path)

    def can_rename(self, source: str, target: str) -> bool:
        return self._real.can_rename(source, target)

    # Directories.

    def status(self, path: str) -> FileStatus:
        with self._call("status", path):
            return self._real.status(path)

    def exists(self, path: str) -> bool:
        with self._call("exists", path):
            return self._real.exists(path)

    def list(self, path: str) -> list[str]:
        with self._call("list", path):
            return self._real.list(path)

    def make_directory(self, path: str) -> None:
        with self._call("make_directory", path):
            self._check_stop()
            self._real.make_directory(path)
            self._inodes[self._name(path)] = 0
            self._note(Kind.MAKE_DIRECTORY, self._name(path))

    def remove_directory(self, path: str) -> None:
        with self._call("remove_directory", path):
            self._check_stop()
            self._real.remove_directory(path)
            self._inodes.pop(self._name(path), None)
            self._note(Kind.REMOVE_DIRECTORY, self._name(path))

    def rename(self, source: str, target: str) -> None:
        with self._call("rename", source):
            self._check_stop()
            self._real.rename(source, target)
            old, new = self._name(source), self._name(target)
            for name in [n for n in self._inodes if n == old or n.startswith(f"{old}/")]:
                self._inodes[new + name[len(old) :]] = self._inodes.pop(name)
            self._note(Kind.RENAME, old, target=new)

    def unlink(self, path: str) -> None:
        with self._call("unlink", path):
            self._check_stop()
            self._real.unlink(path)
            self._inodes.pop(self._name(path), None)
            self._note(Kind.UNLINK, self._name(path))

    def sync_directory(self, path: str) -> None:
        with self._call("sync_directory", path):
            self._check_stop()
            self._real.sync_directory(path)
            self._note(Kind.SYNC_DIRECTORY, self._name(path))

    def space(self, path: str) -> Space:
        with self._call("space", path):
            return self._real.space(path)

    def kind(self, path: str) -> str:
        with self._call("kind", path):
            return self._kind

    def database_committed(self, path: str) -> None:
        with self._call("database_committed", path):
            self._check_stop()
            with open(path, "rb") as file:
                data = file.read()
            image = IndexImage(number=len(self.operations), path=self._name(path), data=data)
            self.index_images.append(image)
            self._note(Kind.INDEX, self._name(path))

    # Around a workload.

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """For a block, no fault fires and no call counts: the hand of the test is at work."""
        self._is_undisturbed = True
        try:
            yield
        finally:
            self._is_undisturbed = False

    def shut_down(self) -> None:
        """Close what the stopped workload left open; its locks go with the descriptors."""
        with self._mutex:
            for file in list(self._open_files):
                self._real.close(file)
            self._open_files.clear()

    def _name(self, path: str) -> str:
        full = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        name = os.path.relpath(full, self.root)
        assert not name.startswith(".."), f"{path} is outside of {self.root}"
        return "" if name == "." else name

    def _path(self, file: int) -> str:
        return self._open_files.get(file, (0, ""))[1]

    def _note(self, kind: Kind, path: str, **fields: object) -> None:
        if path.endswith(DATABASE_SUFFIX) and kind is not Kind.INDEX:
            return
        operation = Operation(number=len(self.operations), kind=kind, path=path)
        self._append(replace(operation, **fields))  # type: ignore[arg-type]

    def _append(self, operation: Operation) -> None:
        if operation.kind in (Kind.SYNC, Kind.SYNC_DIRECTORY) and self._ignore(operation):
            operation = replace(operation, kind=Kind.IGNORED)
        self.operations.append(operation)
        if self._fault is not None:
            self._disk.advance(operation)

    def _check_stop(self) -> None:
        if self.stop_at is not None and len(self.operations) >= self.stop_at:
            self.crashed = True
            raise Crash(f"stopped before operation {self.stop_at}")

    @contextmanager
    def _call(self, operation: str, path: str = "") -> Iterator[int | None]:
        """Count a call, fail it if it is its turn; gives the length of a short transfer."""
        with self._mutex:
            if self.crashed:
                raise Crash("the machine has stopped")
            self.calls[operation] += 1
            fault = self._fault
            if fault is None or not self._is_due(fault, operation, path):
                yield None
                return
            self.fired_count += 1
            if fault.short is None:
                raise OSError(fault.error, os.strerror(fault.error), path or None)
            yield fault.short

    def _is_due(self, fault: Fault, operation: str, path: str) -> bool:
        part = path.removeprefix(self.root)
        if fault.operation != operation or fault.path_contains not in part:
            return False
        if self._is_undisturbed:
            return False
        self._matched_count += 1
        late = fault.persistent and self._matched_count > fault.nth
        return self._matched_count == fault.nth or late

    def _sync(self, operation: str, file: int) -> None:
        inode, name = self._open_files[file]
        try:
            with self._call(operation, name):
                self._check_stop()
                self._real.fsync(file)
                self._note(Kind.SYNC, name, inode=inode)
        except OSError:
            with self._mutex:
                self._lose_pages(file, inode, name)
            raise

    def _lose_pages(self, file: int, inode: int, name: str) -> None:
        """After a failed sync: mark the pending writes as lost, and show what memory holds now."""
        assert self._fault is not None
        lost = [o for o in self._disk.pending if o.inode == inode and o.kind is Kind.WRITE]
        if self._fault.pages == "old":
            content = self._disk.durable_content(inode)
            self._real.truncate(file, len(content))
            self._real.pwrite(file, content, 0)
        elif self._fault.pages == "zero":
            for write in lost:
                self._real.pwrite(file, bytes(len(write.data)), write.offset)
        self._note(Kind.SYNC_FAILED, name, inode=inode)


def read_tree(root: str) -> Mapping[str, bytes | None]:
    """Every file and directory below `root`, less the files of the index."""
    tree: dict[str, bytes | None] = {}
    for directory, directories, names in os.walk(root):
        for name in directories:
            tree[os.path.relpath(os.path.join(directory, name), root)] = None
        for name in names:
            if name.endswith(DATABASE_SUFFIX):
                continue
            path = os.path.join(directory, name)
            with open(path, "rb") as file:
                tree[os.path.relpath(path, root)] = file.read()
    return tree
