"""What a disk may hold after a crash: durable bytes and entries, and operations still pending.

Owns the rules of durability. Assumptions about the medium, and nothing beyond them:

- fsync and fdatasync make durable what was written to their file before, its size included, and
  no directory entry. Syncing a directory makes its entries durable, not the files behind them.
- What is not synced may be on the disk or not, each operation by itself, in any order; only
  operations on the same directory entry keep their order.
- A rename is atomic: the entry moves or stays, also between two directories.
- A sector of 512 bytes is written whole or not at all, as memory held it: with a write it holds all
  earlier writes to the same sector. Overwriting leaves each sector old or new.
- A file that grew may show its old size, or any size up to the new one; where its data was not yet
  written it shows zeros, or garbage in sectors that it did not have before.
- A write that was pending when a sync of its file failed is never made durable by a later sync;
  bytes written again are.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from shardb.testing.operations import CONTENT_KINDS, ENTRY_KINDS, Kind, Operation

DIRECTORY = 0
SECTOR_BYTES = 512
Fill = Literal["old", "zero", "garbage"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """How much of a pending write reached the disk: its bytes from `start` to `stop`.

    The rest is `old`: as it was, and the file does not grow; or the file has grown and shows zeros
    or garbage where it was not long enough before.
    """

    start: int = 0
    stop: int | None = None
    fill: Fill = "old"


WHOLE = Kept()
Choice = Mapping[int, Kept]


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """The tree of one possible disk: path to content, None for a directory."""

    files: Mapping[str, bytes | None]
    key: bytes

    def materialise(self, root: str) -> None:
        """Write the tree below `root`, which must exist."""
        for path, content in self.files.items():
            full = os.path.join(root, path)
            if content is None:
                os.mkdir(full)
            else:
                file = os.open(full, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
                try:
                    os.write(file, content)
                finally:
                    os.close(file)


@dataclass(frozen=True, slots=True)
class _Content:
    data: bytes
    digest: bytes


class DiskState:
    """The disk while a recorded workload goes on: feed it operations in order with `advance`."""

    def __init__(self, files: Mapping[str, bytes | None] | None = None) -> None:
        """Start from a tree that is durable in all its parts; the files get inodes 1, 2, …"""
        self.entries: dict[str, int] = {}
        self.content: dict[int, bytes] = {}
        self.pending: list[Operation] = []
        self._lost: set[int] = set()
        self._cache: dict[tuple[int, tuple[tuple[int, Kept], ...]], _Content] = {}
        for path, data in sorted((files or {}).items()):
            inode = DIRECTORY
            if data is not None:
                inode = len(self.content) + 1
                self.content[inode] = data
            self.entries[path] = inode

    def advance(self, operation: Operation) -> None:
        """Take note of the next operation."""
        if operation.kind in CONTENT_KINDS or operation.kind in ENTRY_KINDS:
            self.pending.append(operation)
        elif operation.kind is Kind.SYNC:
            self._sync_file(operation.inode)
        elif operation.kind is Kind.SYNC_FAILED:
            self._lost.update(o.number for o in self._pending_content(operation.inode))
        elif operation.kind is Kind.SYNC_DIRECTORY:
            self._sync_directory(operation.path)

    def image(self, choice: Choice) -> Image:
        """The tree when exactly the chosen pending operations reached the disk."""
        entries = dict(self.entries)
        entry_operations = [o for o in self.pending if o.kind in ENTRY_KINDS]
        _apply_entries(entries, _in_order(entry_operations, choice))
        hasher = hashlib.blake2b(digest_size=16)
        files: dict[str, bytes | None] = {}
        for path in sorted(entries):
            parent = os.path.dirname(path)
            if parent and parent not in files:
                continue  # Durable, but in a directory whose own entry is not there.
            inode = entries[path]
            found = None if inode == DIRECTORY else self._content(inode, choice)
            files[path] = None if found is None else found.data
            digest = b"directory" if found is None else found.digest
            hasher.update(b"%d:%s%s" % (len(path), path.encode(), digest))
        return Image(files=files, key=hasher.digest())

    def copy(self) -> DiskState:
        """A second disk in the same state."""
        other = DiskState()
        other.entries = dict(self.entries)
        other.content = dict(self.content)
        other.pending = list(self.pending)
        other._lost = set(self._lost)
        return other

    def live_entries(self) -> dict[str, int]:
        """Paths and inodes as running programs see them: all pending operations included."""
        entries = dict(self.entries)
        _apply_entries(entries, [o for o in self.pending if o.kind in ENTRY_KINDS])
        return entries

    def everything(self) -> Choice:
        """The choice that keeps all pending operations: what programs see."""
        return {operation.number: WHOLE for operation in self.pending}

    def durable_content(self, inode: int) -> bytes:
        """The bytes of a file that no crash can take away."""
        return self.content.get(inode, b"")

    def _pending_content(self, inode: int) -> list[Operation]:
        return [o for o in self.pending if o.kind in CONTENT_KINDS and o.inode == inode]

    def _content(self, inode: int, choice: Choice) -> _Content:
        chosen = tuple(
            (o.number, choice[o.number]) for o in self._pending_content(inode) if o.number in choice
        )
        key = (inode, chosen)
        if key not in self._cache:
            data = bytearray(self.durable_content(inode))
            for operation, kept in _with_earlier(self._pending_content(inode), dict(chosen)):
                _apply_content(data, operation, kept)
            digest = hashlib.blake2b(data, digest_size=16).digest()
            self._cache[key] = _Content(bytes(data), digest)
        return self._cache[key]

    def _sync_file(self, inode: int) -> None:
        data = bytearray(self.durable_content(inode))
        remaining: list[Operation] = []
        for operation in self.pending:
            mine = operation.kind in CONTENT_KINDS and operation.inode == inode
            lost = operation.number in self._lost and operation.kind is Kind.WRITE
            if not mine or lost:
                remaining.append(operation)
                continue
            _apply_content(data, operation, WHOLE)
            remaining = [part for o in remaining for part in _uncovered(o, operation)]
        self.pending = remaining
        self.content[inode] = bytes(data)
        self._cache.clear()

    def _sync_directory(self, path: str) -> None:
        """Make the entries of a directory durable, with the earlier moves they depend on."""
        needed: set[str] = set()
        synced: set[int] = set()
        for operation in reversed(self.pending):
            names = operation.names
            if any(os.path.dirname(name) == path or name in needed for name in names):
                needed.update(names)
                synced.add(operation.number)
        done = [o for o in self.pending if o.number in synced]
        self.pending = [o for o in self.pending if o.number not in synced]
        _apply_entries(self.entries, done)


def _in_order(operations: Iterable[Operation], chosen: Collection[int]) -> list[Operation]:
    """The chosen entry operations, less those whose entry lost an earlier operation."""
    blocked: set[str] = set()
    kept: list[Operation] = []
    for operation in operations:
        if operation.number in chosen and blocked.isdisjoint(operation.names):
            kept.append(operation)
        else:
            blocked.update(operation.names)
    return kept


def _apply_entries(entries: dict[str, int], operations: Iterable[Operation]) -> None:
    for operation in operations:
        path = operation.path
        if operation.kind in (Kind.CREATE, Kind.MAKE_DIRECTORY):
            entries[path] = operation.inode
        elif operation.kind in (Kind.UNLINK, Kind.REMOVE_DIRECTORY):
            entries.pop(path, None)
        elif path in entries:
            moved = {p: i for p, i in entries.items() if p == path or p.startswith(f"{path}/")}
            for old, inode in moved.items():
                del entries[old]
                entries[operation.target + old[len(path) :]] = inode


def _apply_content(data: bytearray, operation: Operation, kept: Kept) -> None:
    if operation.kind is Kind.TRUNCATE:
        _resize(data, operation.length)
    elif operation.kind is Kind.EXTEND:
        _resize(data, max(len(data), operation.length))
    else:
        _apply_write(data, operation, kept)


def _with_earlier(operations: list[Operation], choice: Choice) -> Iterator[tuple[Operation, Kept]]:
    """The chosen operations, and of the others what shares a sector with a later chosen write."""
    parts: list[tuple[Operation, Kept]] = []
    written: set[int] = set()
    for operation in reversed(operations):
        kept = choice.get(operation.number)
        if operation.kind is Kind.WRITE:
            whole = kept is not None and kept.start == 0 and kept.stop is None
            end = operation.offset + len(operation.data)
            if not whole:
                for sector in sorted(written & set(_sectors(operation.offset, end))):
                    start = max(0, sector * SECTOR_BYTES - operation.offset)
                    stop = min(end, (sector + 1) * SECTOR_BYTES) - operation.offset
                    parts.append((operation, Kept(start=start, stop=stop)))
            if kept is not None:
                stop = end if kept.stop is None else operation.offset + kept.stop
                written.update(_sectors(operation.offset + kept.start, stop))
        if kept is not None:
            parts.append((operation, kept))
    return reversed(parts)


def _sectors(start: int, stop: int) -> range:
    """Numbers of the sectors that hold bytes `start` to `stop` of a file."""
    return range(start // SECTOR_BYTES, -(-stop // SECTOR_BYTES)) if start < stop else range(0)


def _apply_write(data: bytearray, operation: Operation, kept: Kept) -> None:
    stop = len(operation.data) if kept.stop is None else kept.stop
    end = operation.offset + len(operation.data)
    old_length = len(data)
    if kept.fill != "old" and end > old_length:
        data.extend(bytes(end - old_length))
        fresh = -(-old_length // SECTOR_BYTES) * SECTOR_BYTES
        if kept.fill == "garbage" and fresh < end:
            data[fresh:] = random.Random(operation.number).randbytes(end - fresh)
    if kept.start < stop:
        start = operation.offset + kept.start
        _resize(data, max(len(data), start))
        data[start : operation.offset + stop] = operation.data[kept.start : stop]


def _resize(data: bytearray, length: int) -> None:
    if length < len(data):
        del data[length:]
    else:
        data.extend(bytes(length - len(data)))


def _uncovered(lost: Operation, later: Operation) -> list[Operation]:
    """The parts of a lost write that a later synced write of the same file did not replace."""
    if lost.inode != later.inode or lost.kind is not Kind.WRITE or later.kind is not Kind.WRITE:
        return [lost]
    end, later_end = lost.offset + len(lost.data), later.offset + len(later.data)
    parts: list[Operation] = []
    for start, stop in ((lost.offset, min(end, later.offset)), (max(lost.offset, later_end), end)):
        if start < stop:
            piece = lost.data[start - lost.offset : stop - lost.offset]
            parts.append(replace(lost, offset=start, data=piece))
    return parts
