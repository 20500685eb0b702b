"""Object files: immutable bytes of shards, named by their digest, and the files kept for reuse.

Owns `objects/` and `spare/`. Knows which bytes a file holds, not who references it: liveness is the
index's question, and a file name alone is never believed.

spare/ holds `free.<bytes>.<unique>` (retired files, extents already written) and
`staged.<branch>.<unique>` (being written by the transaction that holds the branch's lock).
A live object is never opened for writing: a retired file leaves `objects/` before it is reused.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

import numpy as np
import xxhash

from shardb import layout
from shardb.buffers import PAGE_BYTES, Bytes, PooledBuffer
from shardb.errors import ObjectCorruptError, ObjectMissingError
from shardb.filesystem import (
    CREATE,
    DIRECT,
    EXCLUSIVE,
    READ,
    WRITE,
    FileStatus,
    FileSystem,
    close_quietly,
    closing,
    leads_nowhere,
    open_direct,
    opened,
    write_all,
)
from shardb.layout import Layout
from shardb.references import Retired
from shardb.storage_errors import storage_error
from shardb.verifying import Verified

OBJECT_SUFFIX = ".safetensors"
PACK_SUFFIX = ".pack"
# Packing and unpacking put one file of an object in the place of the other one.
OPEN_ATTEMPTS = 2
# Below this size direct I/O, which needs a second descriptor, costs more than it saves.
DIRECT_THRESHOLD_BYTES = 256 << 10
WRITE_CHUNK_BYTES = 8 << 20
# Files kept open between writing and the batched sync; beyond it a file is synced when written.
OPEN_FILES_LIMIT = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedObject:
    """A written, not yet synced object file under a staged name."""

    digest: str
    bytes: int
    path: str
    buffer: PooledBuffer | None = None  # the mapping, where the file is one


class ObjectFiles:
    """The object and spare files of one store.

    An object has one of two files: its image, or a packed one, which `open_packed` unpacks; it
    raises FileNotFoundError when there is none (see `shardb.pack_reading`).
    """

    open_packed: Callable[[str, int], tuple[Layout, Bytes]] | None = None

    def __init__(self, files: FileSystem, root: str, *, verify: bool) -> None:
        self.files = files
        self.directory = f"{root}/objects"
        self.spare_directory = f"{root}/spare"
        self.verified = Verified(wanted=verify)
        self._mapped: Counter[str] = Counter()
        self._unmapped: deque[str] = deque()  # filled by garbage collection, which takes no lock
        self._lock = threading.Lock()
        self._direct = DIRECT != 0
        self._free: dict[int, list[str]] | None = None
        self._open_files: dict[str, int] = {}  # staged path to descriptor, until placed or dropped

    def path(self, digest: str) -> str:
        return f"{self.directory}/{digest}{OBJECT_SUFFIX}"

    def packed_path(self, digest: str) -> str:
        return f"{self.directory}/{digest}{PACK_SUFFIX}"

    # Reading

    def open(self, digest: str, size_bytes: int) -> tuple[Layout, Bytes]:
        """Map an object, or unpack it. The first time this process reads it, its digest is checked.

        Raises ObjectMissingError, or ObjectCorruptError when size, header or digest are wrong.
        """
        for _ in range(OPEN_ATTEMPTS):
            with suppress(FileNotFoundError):
                return self._open_image(digest, size_bytes)
            if self.open_packed is not None:
                with suppress(FileNotFoundError):
                    return self.open_packed(digest, size_bytes)
        path = self.path(digest)
        if leads_nowhere(self.files, path):  # what it leads to may be whole
            lost = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            raise storage_error(self.files, path, "reading the object", lost)
        raise ObjectMissingError(f"{path}: the object is missing; run `shardb fsck`", path=path)

    def _open_image(self, digest: str, size_bytes: int) -> tuple[Layout, Bytes]:
        path = self.path(digest)
        with opened(self.files, path, READ) as file:
            status = self.files.status(path)
            if status.size_bytes != size_bytes:
                raise ObjectCorruptError(
                    f"{path}: {status.size_bytes} bytes, but {size_bytes} were committed; run "
                    "`shardb fsck`",
                    path=path,
                )
            self.verified.check_file(self.files, file, path, digest, status.stamp)
            mapping = self.files.map(file, size_bytes, writable=False)
        with self._lock:
            self._mapped[digest] += 1
        weakref.finalize(mapping, self._unmapped.append, digest).atexit = False
        image: Bytes = np.frombuffer(mapping, dtype=np.uint8)
        return layout.parse(image.data, path), image

    def _is_mapped(self, digest: str) -> bool:
        """Whether views of an object, opened from its file, are alive in this process."""
        with self._lock:
            while self._unmapped:
                ended = self._unmapped.popleft()
                self._mapped[ended] -= 1
                if not self._mapped[ended]:
                    del self._mapped[ended]
            return digest in self._mapped

    def look(self, digest: str) -> FileStatus | None:
        """What is known of an object's file; None when it is not there."""
        try:
            return self.files.status(self.path(digest))
        except FileNotFoundError:
            return None

    # Writing

    def write(self, image: Bytes, branch: str) -> StagedObject:
        """Write an image to a staged file, computing its digest on the way. Nothing is synced."""
        return self.write_chunks(chunks_of(image.data), len(image), branch)

    def write_chunks(
        self, chunks: Iterable[memoryview], size: int, branch: str, *, content: str = ""
    ) -> StagedObject:
        """Write chunks, `size` bytes together, to a staged file, computing their digest on the way.

        Every chunk but the last has whole pages and begins on one in memory. `content`, the digest
        that is expected, becomes part of the staged name (see `adopt`). Nothing is synced.
        """
        path, fresh = self.staged_path(branch, size, content)
        file = self.files.open(path, WRITE | (CREATE | EXCLUSIVE if fresh else 0))
        try:
            digest = self._write_out(file, path, chunks, size)
        except BaseException:
            self._give_up(path, file, size, fresh=fresh)
            raise
        self._keep_open(path, file)
        return StagedObject(digest=digest, bytes=size, path=path)

    def _write_out(self, file: int, path: str, chunks: Iterable[memoryview], size: int) -> str:
        """Whole pages go past the page cache, the rest through it; return the digest."""
        hasher = xxhash.xxh3_128()
        offset = 0
        with self._direct_file(path, size) as direct:
            for chunk in chunks:
                hasher.update(chunk)
                pages = len(chunk) // PAGE_BYTES * PAGE_BYTES if direct is not None else 0
                if direct is not None and pages:
                    write_all(self.files, direct, chunk[:pages], offset)
                if pages < len(chunk):
                    write_all(self.files, file, chunk[pages:], offset + pages)
                offset += len(chunk)
        assert offset == size, f"{offset} bytes came, {size} were announced"
        return hasher.hexdigest()

    @contextmanager
    def _direct_file(self, path: str, size: int) -> Iterator[int | None]:
        """A descriptor that writes past the page cache, where that can be and gains something."""
        direct = (
            self._open_direct(path) if self._direct and size >= DIRECT_THRESHOLD_BYTES else None
        )
        with nullcontext() if direct is None else closing(self.files, direct, written=True):
            yield direct

    def _open_direct(self, path: str) -> int | None:
        file = open_direct(self.files, path, WRITE)
        self._direct = file is not None
        return file

    def _give_up(self, path: str, file: int, size: int, *, fresh: bool) -> None:
        """After a failed write: a full disk needs a new file's space more than the file."""
        close_quietly(self.files, file)
        with suppress(OSError):
            if fresh:
                self.files.unlink(path)
            else:
                self._to_spare(path, size)

    def _keep_open(self, path: str, file: int) -> None:
        """Keep a written file open for the batched sync; beyond a limit sync it now."""
        with self._lock:
            if len(self._open_files) < OPEN_FILES_LIMIT:
                self._open_files[path] = file
                return
        with closing(self.files, file, written=True):
            self.files.fdatasync(file)

    def _close(self, staged: StagedObject, *, needed: bool) -> None:
        """Close a staged file; what close says counts where its bytes are needed as they are."""
        with self._lock:
            file = self._open_files.pop(staged.path, None)
        if file is not None:
            with closing(self.files, file, written=needed):
                pass

    def digest_mapped(self, image: Bytes, buffer: PooledBuffer, known: str | None) -> StagedObject:
        """The staged object that a filled mapping already is; `known` is its digest."""
        assert buffer.path is not None
        digest = known or xxhash.xxh3_128_hexdigest(image.data)
        return StagedObject(digest=digest, bytes=len(image), path=buffer.path, buffer=buffer)

    def staged_name(self, branch: str, content: str = "") -> str:
        """A new name for a file being staged; `content` is the digest it is meant to have."""
        name = f"staged.{branch_token(branch)}.{content}{os.urandom(8).hex()}"
        return f"{self.spare_directory}/{name}"

    def rename(self, source: str, target: str) -> None:
        self.files.rename(source, target)

    def staged_path(self, branch: str, size: int, content: str = "") -> tuple[str, bool]:
        """A staged file of the right size: a spare one when there is one, else a new name."""
        while (free := self._take_free(size)) is not None:
            staged = self.staged_name(branch, content)
            with suppress(FileNotFoundError):  # another process took it
                self.files.rename(free, staged)
                status = self.files.status(staged)
                if status.is_directory:
                    continue  # `fsck` names it
                if status.size_bytes <= size and not status.is_shared:
                    return staged, False
                # Bytes behind the image would be part of the object; a file that another copy of
                # the store has by a link would be overwritten there.
                self.files.unlink(staged)
        return self.staged_name(branch, content), True

    def _take_free(self, size: int) -> str | None:
        with self._lock:
            if self._free is None:
                self._free = {}
                for name in self.files.list(self.spare_directory):
                    if (length := free_bytes_of(name)) is not None:
                        self._free.setdefault(length, []).append(f"{self.spare_directory}/{name}")
            waiting = self._free.get(size)
            return waiting.pop() if waiting else None

    # Committing

    def sync(self, staged: StagedObject) -> None:
        """Make a staged file's bytes durable."""
        file = self._open_files.get(staged.path)
        if file is not None:
            self.files.fdatasync(file)

    def place(self, staged: StagedObject) -> None:
        """Give a synced staged file its content name, replacing a leftover of that name."""
        self._close(staged, needed=True)
        self.files.rename(staged.path, self.path(staged.digest))
        self.verified.forget(staged.digest)  # a file is checked when it is first read
        if staged.buffer is not None:
            staged.buffer.path = self.path(staged.digest)
            assert staged.buffer.stamp is not None, "what maps a file has its stamp"
            self.verified.note(staged.digest, staged.buffer.stamp)

    def sync_directory(self) -> None:
        self.files.sync_directory(self.directory)

    def drop(self, staged: StagedObject) -> None:
        """Give a staged file back for reuse; a mapped one goes back with its buffer."""
        self._close(staged, needed=False)
        if staged.buffer is not None:
            return
        self._to_spare(staged.path, staged.bytes)

    def retire(self, retired: Iterable[Retired]) -> None:
        """Take objects that nothing references out of `objects/`."""
        for item in retired:
            self.verified.forget(item.digest)
            if item.packed:
                self.retire_packed(item.digest)
            path = self.path(item.digest)
            try:
                if self._is_mapped(item.digest):
                    # Their bytes must stay: give up the file.
                    self.files.unlink(path)
                else:
                    self._to_spare(path, item.bytes)
            except FileNotFoundError:
                continue

    def retire_packed(self, digest: str) -> None:
        """Remove a packed file. It is never written again: an old name shows the old bytes."""
        with suppress(FileNotFoundError):
            self.files.unlink(self.packed_path(digest))

    def hold(self, digest: str, buffer: PooledBuffer) -> None:
        """Take a retired mapped object out of `objects/`; it is free when its buffer is."""
        self.verified.forget(digest)
        held = f"{self.spare_directory}/held.{buffer.size_bytes}.{os.urandom(8).hex()}"
        buffer.path = held
        try:
            self.files.rename(self.path(digest), held)
        except FileNotFoundError:
            buffer.disown()

    def set_free(self, path: str, size: int) -> str:
        """Give a file of `spare/` the name of one that waits for reuse; return it."""
        free = f"{self.spare_directory}/free.{size}.{os.urandom(8).hex()}"
        self.files.rename(path, free)
        return free

    def _to_spare(self, path: str, size: int) -> None:
        free = self.set_free(path, size)
        with self._lock:
            if self._free is not None:
                self._free.setdefault(size, []).append(free)

    def reclaim_staged(self, branch: str, *, keep: Collection[str] = ()) -> list[str]:
        """Take back what a dead writer of `branch` had staged, but for the paths in `keep`.

        The caller holds the branch's lock. Held files are given up: if their process lives, its
        mappings keep their bytes.
        """
        for name in self.files.list(self.spare_directory):
            if name.startswith("held."):
                self.files.unlink(f"{self.spare_directory}/{name}")
        mine = f"staged.{branch_token(branch)}"
        listed = self.files.list(self.spare_directory)
        names = [name for name in listed if name.rpartition(".")[0] == mine]
        reclaimed = [n for n in names if f"{self.spare_directory}/{n}" not in keep]
        for name in reclaimed:
            path = f"{self.spare_directory}/{name}"
            self._to_spare(path, self.files.status(path).size_bytes)
        return reclaimed

    # Going on with an interrupted copy

    def interrupted(self, branch: str) -> list[tuple[str, str]]:
        """Staged files that copies left: path, and the digest that the name says they may have."""
        pattern = re.compile(
            rf"^staged\.{re.escape(branch_token(branch))}\.([0-9a-f]{{32}})[0-9a-f]+$"
        )
        found = (pattern.match(name) for name in self.files.list(self.spare_directory))
        return [(f"{self.spare_directory}/{m.group(0)}", m.group(1)) for m in found if m]

    def unplace(self, digest: str, branch: str) -> str:
        """Give an object that nothing references a staged name again; return its path."""
        staged = self.staged_name(branch, digest)
        self.files.rename(self.path(digest), staged)
        return staged

    def resume(self, path: str, digest: str, size: int) -> StagedObject:
        """Take over a staged file whose bytes were found to have `digest`; it is synced again."""
        self._keep_open(path, self.files.open(path, WRITE))
        return StagedObject(digest=digest, bytes=size, path=path)

    def leave(self, staged: StagedObject) -> None:
        """Let go of a staged file and leave it there for a later copy."""
        self._close(staged, needed=False)


def chunks_of(data: memoryview) -> Iterator[memoryview]:
    """Bytes in memory, cut into pieces to write."""
    for start in range(0, len(data), WRITE_CHUNK_BYTES):
        yield data[start : start + WRITE_CHUNK_BYTES]


def branch_token(branch: str) -> str:
    """A branch name as part of a file name."""
    return branch.replace("/", "@")


def free_bytes_of(name: str) -> int | None:
    """The size that a spare file's name states, or None when it is no free file."""
    parts = name.split(".")
    return int(parts[1]) if len(parts) == 3 and parts[0] == "free" and parts[1].isdigit() else None
