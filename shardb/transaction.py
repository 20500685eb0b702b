"""A transaction: the staging of the next commit on a branch.

Owns what is staged. Order of a commit, the only order there is:
1. staged objects are written to new or spare files, digests computed on the way; then all synced
2. all renamed to their content names; the one directory synced
3. the declared shard set is checked complete, and the base checked unchanged
4. one commit record is appended to the log, and the log synced: the commit point
5. the index is applied  6. retired objects move to spare files
Steps 2 to 6 happen under the log's lock. Leaving the `with` block without a commit aborts.
"""

from __future__ import annotations

import time as clock
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from shardb import layout
from shardb.buffers import PooledBuffer
from shardb.digesting import GrowingDigest
from shardb.errors import IncompleteCommitError, NotFoundError, UsageError
from shardb.layout import TensorSpec
from shardb.listing import listed
from shardb.objects import StagedObject
from shardb.publishing import publish_commit
from shardb.records import Commit, ShardEntry, new_id, stored_form
from shardb.refs import no_such
from shardb.views import Array, ShardView, StagedShard, TensorImage, specs_of

if TYPE_CHECKING:
    from shardb.store import Store

# What a log record can hold.
STEP_LIMIT = 1 << 63


@dataclass(kw_only=True)
class Staged:
    """A shard staged in this transaction: its image, and the file it is being written to.

    `buffer` holds the image, and is None once that was let go.
    """

    image: StagedShard
    buffer: PooledBuffer | None
    trainable: bool
    digest: GrowingDigest | None = None
    written: Future[StagedObject] | None = None


class Transaction:
    """Made by `Store.begin`; use it as a context manager."""

    def __init__(self, store: Store, branch: str, base: Commit | None) -> None:
        self._store = store
        self.branch = branch
        self.base = base
        self.id = new_id()
        self._staged: dict[str, Staged] = {}
        self._open = True

    def names(self) -> list[str]:
        """Shards that can be read: those of the base and those staged here."""
        return sorted({*(self.base.shards if self.base else ()), *self._staged})

    def read(self, name: str) -> ShardView:
        """The shard as staged here, else as committed in the base; immutable, zero-copy.

        Raises NotFoundError when there is no such shard, UsageError when it is staged but not
        sealed yet, ObjectCorruptError or ObjectMissingError when its object is damaged.
        """
        self._check_open()
        staged = self._staged.get(name)
        if staged is not None:
            if not staged.image.sealed:
                raise UsageError(f"shard {name!r} is staged but not sealed; call seal() first")
            if staged.buffer is None:
                raise UsageError(f"shard {name!r} was let go: it can be read after the commit")
            digest = _digest_if_written(staged)
            image = staged.buffer.array(staged.image.bytes, writable=False)
            return ShardView(name, staged.image.layout, image, digest)
        if self.base is None or name not in self.base.shards:
            known = self.base.shards if self.base is not None else ()
            raise NotFoundError(no_such("shard", name, known))
        return self._store.read_object(name, self.base.shards[name])

    def stage(
        self,
        name: str,
        like: TensorImage | Mapping[str, TensorSpec],
        *,
        trainable: bool = True,
    ) -> StagedShard:
        """A writable image for the next version of a shard; every byte of it must be written.

        `like` is a view or a mapping of tensor names to specifications. The image is stable host
        memory, aligned to pages. Call `seal()` on it as soon as it is complete; `commit` seals
        what was not. Raises UsageError for a bad name or specification, or when it is staged.
        """
        self._check_open()
        self._store.appender.check_usable()
        layout.check_name(name, "shard")
        if name in self._staged:
            raise UsageError(f"shard {name!r} is staged already; discard() it to stage it again")
        placed = like.layout if isinstance(like, TensorImage) else layout.build(like)
        if isinstance(like, TensorImage):
            placed = layout.build(placed.specs)
        with self._store.appender.errors(f"staging shard {name!r}", placed.size_bytes):
            buffer = self._store.buffers.take(placed.size_bytes, self.branch)
        image = buffer.array(placed.size_bytes, writable=True)
        image[: len(placed.header)] = np.frombuffer(placed.header, dtype=np.uint8)
        shard = StagedShard(
            name,
            placed,
            image,
            self._write_out,
            mapping=buffer.file_mapping,
            fill=None if buffer.path is None else self._digest_to,
        )
        self._staged[name] = Staged(image=shard, buffer=buffer, trainable=trainable)
        return shard

    def write(self, name: str, tensors: Mapping[str, Array], *, trainable: bool = True) -> None:
        """Stage a shard from numpy arrays, copying them; any memory order is stored in C order."""
        shard = self.stage(name, specs_of(tensors), trainable=trainable)
        with self.filling(name):
            for tensor, array in tensors.items():
                np.copyto(shard.array(tensor), array)
        shard.seal()

    @contextmanager
    def filling(self, name: str) -> Iterator[None]:
        """Discard a staged shard when filling it fails: what is half-filled must not be sealed."""
        try:
            yield
        except BaseException:
            self.discard(name)
            raise

    def let_go(self, name: str) -> None:
        """Wait until a staged shard is written and give its memory back, sealing it first.

        It cannot be read before the commit. So a commit of any size needs the memory of one shard.
        The image must not be used any more. UsageError when it is not staged.
        """
        self._check_open()
        staged = self._staged.get(name)
        if staged is None:
            raise UsageError(f"shard {name!r} is not staged in this transaction")
        staged.image.seal()
        assert staged.written is not None
        staged.written.result()
        if staged.buffer is not None and staged.buffer.path is None:
            staged.image.image = np.empty(0, dtype=np.uint8)
            staged.buffer.release(self._store.buffers)
            staged.buffer = None

    def discard(self, name: str) -> None:
        """Drop what is staged of a shard, so that it can be staged again."""
        self._check_open()
        staged = self._staged.pop(name, None)
        if staged is None:
            raise NotFoundError(f"shard {name!r} is not staged in this transaction")
        self._give_back(staged)

    def commit(
        self,
        *,
        step: int,
        state: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        statistics: Mapping[str, Any] | None = None,
        recipe_digest: str | None = None,
    ) -> Commit:
        """Make what is staged, and every frozen shard of the base, the next commit of the branch.

        Returns when the commit is durable. Raises IncompleteCommitError when a trainable shard of
        the base is not staged, UsageError when `step` is not beyond the base's or a field cannot
        be stored, ConflictError when the branch has moved, StorageFullError when there is no space
        (nothing is changed), StorageFailedError when the storage failed, and CommitUnknownError
        (`definite` False) when it failed while the commit record was being written.
        """
        self._check_open()
        self._store.appender.check_usable()
        self._check_complete(step)
        if not isinstance(recipe_digest, str | None):
            raise UsageError(f"recipe_digest is {recipe_digest!r}; it must be text or None")
        told: dict[str, Any] = {
            "state": stored_form("state", state),
            "metrics": stored_form("metrics", metrics),
            "statistics": stored_form("statistics", statistics),
            "recipe": recipe_digest,
        }
        for staged in self._staged.values():
            staged.image.seal()
        try:
            objects = self._wait_and_sync()
            self._check_base()
            commit = self._new_commit(objects, step, told)
            publish_commit(self._store, commit, objects)
        except BaseException:
            self.abort()
            raise
        for name, staged in self._staged.items():
            self._keep(objects[name], staged)
        self._store.patrol.go_on(commit)
        self._close()
        return commit

    def abort(self) -> None:
        """Drop everything staged. Nothing of it was ever visible."""
        if not self._open:
            return
        while self._staged:  # one by one: an interrupt in the middle must not give back twice
            self._give_back(self._staged.popitem()[1])
        self._close()

    def forget(self) -> None:
        """In a forked child: be over without touching what the parent has staged."""
        self._open = False
        self._staged = {}

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()

    # Parts

    def _digest_to(self, shard: StagedShard, size_bytes: int) -> None:
        staged = self._staged[shard.name]
        if staged.digest is None:
            assert staged.buffer is not None, "a mapped image is never let go"
            image = staged.buffer.array(shard.bytes, writable=False)
            staged.digest = GrowingDigest(image, self._store.writer.start)
        staged.digest.fill_to(size_bytes)

    def _write_out(self, shard: StagedShard) -> None:
        staged = self._staged[shard.name]
        branch = self.branch
        buffer = staged.buffer
        assert buffer is not None, "an image is let go after it was sealed"
        image = buffer.array(shard.bytes, writable=False)
        shard.image = image  # what the caller asks for from here on is read-only
        digest = staged.digest
        staged.written = self._store.writer.submit(
            lambda: self._store.write_object(shard.name, image, buffer, branch, digest)
        )

    def _wait_and_sync(self) -> dict[str, StagedObject]:
        objects: dict[str, StagedObject] = {}
        for name, staged in self._staged.items():
            assert staged.written is not None
            objects[name] = staged.written.result()
            buffer = staged.buffer
            if buffer is not None and buffer.path is not None and buffer.writers:
                objects[name] = self._copied(staged, buffer)
        self._store.sync_objects(list(objects.values()))
        return objects

    def _copied(self, staged: Staged, buffer: PooledBuffer) -> StagedObject:
        """Copy a mapped image that the caller can still write into: an object never changes."""
        store, size = self._store, staged.image.bytes
        copy = store.buffers.take(size, self.branch)
        copy.array(size, writable=True)[:] = staged.image.image
        buffer.release(store.buffers)
        staged.buffer = copy
        staged.image.image = image = copy.array(size, writable=False)
        written = store.write_object(staged.image.name, image, copy, self.branch)
        staged.written = Future()
        staged.written.set_result(written)
        return written

    def _check_base(self) -> None:
        with self._store.appender.errors("checking what the step was made from"):
            self._store.patrol.check(self.base)

    def _check_complete(self, step: int) -> None:
        if type(step) is not int or not 0 <= step < STEP_LIMIT:
            raise UsageError(f"step is {step!r}; it must be a whole number >= 0")
        if self.base is None:
            if not self._staged:
                raise IncompleteCommitError("the first commit of a branch needs at least one shard")
            return
        if step <= self.base.step:
            raise UsageError(
                f"step {step} is not beyond step {self.base.step}, where branch {self.branch!r} is"
            )
        missing = [
            name
            for name, entry in self.base.shards.items()
            if entry.trainable and name not in self._staged
        ]
        if missing:
            raise IncompleteCommitError(
                f"step {step} lacks {len(missing)} of {len(self.base.shards)} shards "
                f"({listed(missing, most=5)}): committing would "
                "mix two steps. Stage them, or write them with trainable=False once"
            )

    def _new_commit(
        self, objects: Mapping[str, StagedObject], step: int, told: Mapping[str, Any]
    ) -> Commit:
        shards = dict(self.base.shards) if self.base else {}
        for name, staged_object in objects.items():
            shards[name] = ShardEntry(
                digest=staged_object.digest,
                bytes=staged_object.bytes,
                step=step,
                trainable=self._staged[name].trainable,
            )
        return Commit(
            id=new_id(),
            branch=self.branch,
            step=step,
            parent=self.base.id if self.base else None,
            shards=dict(sorted(shards.items())),
            time=clock.time(),
            **told,
        )

    def _keep(self, written: StagedObject, staged: Staged) -> None:
        """Keep a committed image in memory.

        A mapped duplicate is no object's file, and goes; so does an image that the caller can still
        write into.
        """
        buffer, own = staged.buffer, self._store.objects.path(written.digest)
        if buffer is None:
            return
        if buffer.path in (None, own) and not buffer.writers:
            self._store.cache.put(written.digest, staged.image.layout, buffer)
        else:
            buffer.release(self._store.buffers)

    def _give_back(self, staged: Staged) -> None:
        """Return file and memory of a staged shard; a failed write has nothing to return.

        A mapped file that has its content name is left alone: the commit may have landed.
        """
        buffer = staged.buffer
        if staged.written is not None and staged.written.exception() is None:
            written = staged.written.result()
            if buffer is not None and buffer.path == self._store.objects.path(written.digest):
                buffer.disown()
            else:
                self._store.drop_object(written)
        if buffer is not None:
            buffer.release(self._store.buffers)

    def _close(self) -> None:
        self._open = False
        self._staged = {}
        self._store.transaction_closed(self)

    def _check_open(self) -> None:
        if not self._open:
            raise UsageError("this transaction is over; begin another one")


def _digest_if_written(staged: Staged) -> str | None:
    future = staged.written
    if future is None or not future.done() or future.exception() is not None:
        return None
    return future.result().digest
