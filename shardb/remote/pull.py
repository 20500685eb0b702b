"""Pulling commits and snapshots of a remote store into one on a path.

Owns the remote store as a `CommitSource`: its history, and the bytes of its objects over a network
that may break at any moment. Receiving, which checks every digest before anything is committed, is
the same as from a path: `shardb.transfer_receive`.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator

import numpy as np

from shardb.buffers import BufferPool
from shardb.errors import CorruptionError, ObjectCorruptError, RemoteFailedError
from shardb.records import Commit, ShardEntry
from shardb.remote import layout
from shardb.remote.repository import RemoteStore
from shardb.store import Store
from shardb.transfer import branch_of
from shardb.transfer_lineage import Lineage, Walk
from shardb.transfer_receive import (
    UNCHECKED,
    ExpectedHead,
    Incoming,
    receive_commit,
    receive_snapshot,
)
from shardb.transfer_source import CHUNK_BYTES
from shardb.transfer_tally import Tally

DOWNLOADS_AT_ONCE = 4
# A stream that breaks goes on where it was, after longer and longer pauses.
ATTEMPTS_MAX = 6
FIRST_PAUSE_SECONDS = 0.25


class RemoteSource:
    """A remote store to copy from."""

    def __init__(self, remote: RemoteStore) -> None:
        self._remote = remote
        self._buffers = BufferPool(DOWNLOADS_AT_ONCE * CHUNK_BYTES)

    @property
    def name(self) -> str:
        return self._remote.url

    @property
    def store_id(self) -> str:
        return self._remote.store_id

    @property
    def copies_at_once(self) -> int:
        return DOWNLOADS_AT_ONCE

    def lineage(self, commit: str, ends: Collection[str]) -> Lineage:
        """Walk back over the records; each of them says what was rolled up before it."""
        walk = Walk(commit, ends)
        met: set[str] = set()
        while not walk.ended:
            assert walk.wanted is not None
            if walk.wanted in met:
                raise CorruptionError(f"{self.name}: commit {walk.wanted} is its own ancestor")
            met.add(walk.wanted)
            record = self._remote.record(walk.wanted)
            if record is None:
                break
            walk.meet(record)
        return walk.lineage()

    def object_name(self, entry: ShardEntry) -> str:
        return f"{self._remote.url}/{layout.object_key(entry.digest)}"

    def chunks(self, entry: ShardEntry) -> Iterator[memoryview]:
        """Download through one reused buffer, in whole pages; go on where a stream broke."""
        buffer = self._buffers.take(min(entry.bytes, CHUNK_BYTES), "")
        try:
            image = buffer.array(buffer.size_bytes, writable=True)[:CHUNK_BYTES]
            filled_bytes = received_bytes = 0
            for data in self._stream(entry):
                received_bytes += len(data)
                if received_bytes > entry.bytes:
                    raise self._wrong_size(entry, received_bytes)
                while len(data):
                    taken = min(len(data), len(image) - filled_bytes)
                    part = np.frombuffer(data[:taken], dtype=np.uint8)
                    image[filled_bytes : filled_bytes + taken] = part
                    data = data[taken:]
                    filled_bytes += taken
                    if filled_bytes == len(image):
                        yield image.data
                        filled_bytes = 0
            if received_bytes != entry.bytes:
                raise self._wrong_size(entry, received_bytes)
            if filled_bytes:
                yield image.data[:filled_bytes]
        finally:
            buffer.release(self._buffers)

    def _stream(self, entry: ShardEntry) -> Iterator[memoryview]:
        key = layout.object_key(entry.digest)
        received_bytes = 0
        attempt = 0
        while received_bytes < entry.bytes:
            try:
                for data in self._remote.bucket.chunks(key, received_bytes):
                    received_bytes += len(data)
                    attempt = 0
                    yield data
                return
            except RemoteFailedError:
                attempt += 1
                if attempt == ATTEMPTS_MAX:
                    raise
                time.sleep(FIRST_PAUSE_SECONDS * 2 ** (attempt - 1))

    def _wrong_size(self, entry: ShardEntry, size_bytes: int) -> ObjectCorruptError:
        name = self.object_name(entry)
        return ObjectCorruptError(
            f"{name}: {size_bytes} bytes or more, but {entry.bytes} were committed; nothing was "
            "changed. Push the commit again from a store that has it",
            path=name,
        )


def pull_commit(
    remote: RemoteStore,
    target: Store,
    ref: str | None = None,
    branch: str | None = None,
    *,
    expected_head: ExpectedHead = UNCHECKED,
    tally: Tally | None = None,
) -> Commit:
    """Make a remote commit the head of a branch of `target`; only forward, see `receive_commit`."""
    incoming = Incoming(record=remote.resolve(ref), source=RemoteSource(remote))
    return receive_commit(
        target,
        incoming,
        branch or branch_of(ref, incoming.commit, remote.branches()),
        expected_head=expected_head,
        tally=tally,
    )


def pull_snapshot(
    remote: RemoteStore, target: Store, name: str, *, tally: Tally | None = None
) -> Commit:
    """Copy a remote snapshot under its name; moves no branch."""
    incoming = Incoming(record=remote.resolve(name), source=RemoteSource(remote))
    return receive_snapshot(target, incoming, name, tally=tally)
