"""A model pinned to one commit: its configuration, its tokenizer, its verified shards.

Owns the leases of the server. Knows nothing of requests, caches or arithmetic. Invariants: while a
`PinnedModel` is retained, nothing of its commit is recycled; bytes that `read` gives have the
digest that names them at the moment they are read, every time; a process that dies leaves no lease,
because the lease is a lock.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
import time
from contextlib import suppress

import xxhash

from shardb.errors import ObjectCorruptError, UsageError
from shardb.filesystem import READ, opened
from shardb.read_only import ReadOnlyStore, open_to_look
from shardb.read_view import CommitView
from shardb.records import Commit
from shardb.store import Store
from shardb.views import ShardView
from trainer.model.adapter_settings import LoraSettings
from trainer.model.adapters import settings_in
from trainer.model.config import ModelConfig
from trainer.model.stored import MODEL_SHARD, RECIPE_SHARD, TENSOR, TOKENIZER_SHARD

READ_BYTES = 4 << 20
# Below this a mapping was read from a disk and not from memory; small shards say nothing.
SLOW_BYTES_A_SECOND = 3 << 30
SLOW_BYTES_MIN = 1 << 20


class ModelStore:
    """A store, durable or active, that models are pinned from, beside a trainer that writes to it.

    Open it once and pin from it often; close it when every pin is released.
    """

    def __init__(self, path: str | os.PathLike[str], *, allow_network: bool = False) -> None:
        # Digests are checked by `PinnedModel.read`, at every read instead of the first.
        self.store: Store | ReadOnlyStore = open_to_look(
            os.path.abspath(os.fspath(path)), verify=False, allow_network=allow_network
        )

    @property
    def root(self) -> str:
        """Give the store's folder."""
        return self.store.root

    def resolve(self, ref: str | None = None) -> Commit:
        """Give the retained commit that `ref` names now; NotFoundError when there is none."""
        return self.store.resolve(ref)

    def pin(self, ref: str | None = None) -> PinnedModel:
        """Lease the commit that `ref` names: by default the head of `main`.

        Raises:
            NotFoundError: there is no such commit.
            UsageError: it is not a commit of a training run.
            CorruptionError: its configuration cannot be read.
        """
        view = self.store.at(ref=ref)
        try:
            return PinnedModel(self, view)
        except BaseException:
            view.close()
            raise

    def close(self) -> None:
        """Give up every lease and close the store."""
        self.store.close()

    def __enter__(self) -> ModelStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PinnedModel:
    """One leased commit; made with one reference, and released by the last `release`."""

    def __init__(self, owner: ModelStore, view: CommitView) -> None:
        self.commit: Commit = view.commit
        self._owner = owner
        self._view = view
        self._mapped: dict[str, ShardView] = {}
        self._slow: set[str] = set()
        self._references = 1
        self._closes_store = False
        self._lock = threading.Lock()
        self._next_checked = 0
        self.config = self._read_config()
        self.lora = self._read_lora()
        self.tokenizer_bytes: bytes | None = self._read_small(TOKENIZER_SHARD)

    @classmethod
    def open(cls, path: str | os.PathLike[str], ref: str | None = None) -> PinnedModel:
        """Open a store for this one model; it is closed with the last release."""
        owner = ModelStore(path)
        try:
            pinned = owner.pin(ref)
        except BaseException:
            owner.close()
            raise
        pinned._closes_store = True
        return pinned

    @property
    def is_live(self) -> bool:
        """Say whether the commit is still leased."""
        return self._references > 0

    def retain(self) -> PinnedModel:
        """Count one more holder, and give the model itself."""
        with self._lock:
            if not self._references:
                raise UsageError(f"commit {self.commit.id} was released: pin it again")
            self._references += 1
        return self

    def release(self) -> None:
        """Count one holder less; the last one gives the lease up."""
        with self._lock:
            assert self._references > 0, "released more often than retained"
            self._references -= 1
            if self._references:
                return
        self._mapped.clear()
        self._view.close()
        if self._closes_store:
            self._owner.close()

    def digest(self, shard: str) -> str:
        """Give the digest that names a shard's object."""
        return self.commit.shards[shard].digest

    def size_bytes(self, shard: str) -> int:
        """Give the size of a shard's object."""
        return self.commit.shards[shard].bytes

    def read(self, shard: str, *, again: bool = False) -> ShardView:
        """Map a shard and check its bytes; this also brings them into memory.

        The check runs outside Python's lock, at many times the speed of a disk. With `again` a
        mapped file stays mapped for the next reading; its pages are the system's to take back.

        Raises:
            ObjectCorruptError, ObjectMissingError: the message names the file.
            NotFoundError: the commit has no such shard.
        """
        view = self._mapped.get(shard) or self._view.read(shard)
        if again and _maps_a_file(view):
            self._mapped[shard] = view
        actual = self._digest(shard, view)
        if actual != view.digest:
            path = self._path(shard)
            raise ObjectCorruptError(
                f"{path}: shard {shard} of step {self.commit.step} has digest {actual}, not the one"
                f" that names the file; run `shardb fsck {self._owner.root}`",
                path=path,
            )
        return view

    def _digest(self, shard: str, view: ShardView) -> str:
        """Compute a view's digest, after reading its file where that was slow the last time.

        A mapping that is not in memory is read by faults, two to three times slower than a file.
        """
        started, was_slow = time.perf_counter(), shard in self._slow
        if was_slow:
            self._bring_into_memory(shard)
            seconds = time.perf_counter() - started
        actual = xxhash.xxh3_128_hexdigest(view.image.data)
        if not was_slow:
            seconds = time.perf_counter() - started
        if view.bytes < SLOW_BYTES_MIN or view.bytes > SLOW_BYTES_A_SECOND * seconds:
            self._slow.discard(shard)
        else:
            self._slow.add(shard)
        return actual

    def _bring_into_memory(self, shard: str) -> None:
        files = self._owner.store.files
        with suppress(FileNotFoundError), opened(files, self._path(shard), READ) as file:
            for offset in range(0, self.size_bytes(shard), READ_BYTES):
                files.pread(file, READ_BYTES, offset)

    def _path(self, shard: str) -> str:
        return self._owner.store.objects.path(self.digest(shard))

    def verify_shard(self) -> str:
        """Read one shard of the model, another at each call, and give its name; for readiness."""
        names = [name for name in self.commit.shards if name.startswith("params/")]
        with self._lock:
            name = names[self._next_checked % len(names)]
            self._next_checked += 1
        self.read(name)
        return name

    def _read_config(self) -> ModelConfig:
        data = self._read_small(MODEL_SHARD)
        if data is None:
            raise UsageError(
                f"{self._owner.root}: step {self.commit.step} is not of a training run (no shard"
                f" {MODEL_SHARD}): give another store or REF"
            )
        return ModelConfig.from_json(json.loads(data))

    def _read_lora(self) -> LoraSettings | None:
        """Read what the adapters beside the base are, where there are any."""
        if not any(name.startswith("adapters/") for name in self.commit.shards):
            return None
        data = self._read_small(RECIPE_SHARD)
        return None if data is None else settings_in(data)

    def _read_small(self, shard: str) -> bytes | None:
        if shard not in self.commit.shards:
            return None
        return self.read(shard).array(TENSOR).tobytes()


def _maps_a_file(view: ShardView) -> bool:
    """Say whether a view's bytes are a file's, and not memory that they were unpacked into."""
    base: object = view.image.base
    return isinstance(base.obj if isinstance(base, memoryview) else base, mmap.mmap)
