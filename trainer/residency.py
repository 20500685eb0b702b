"""Which shards are in use right now, and which one comes next.

Owns the order in which a pass needs shards, the optional thread that reads the next ones ahead, and
the counts of how many were active at once. Knows nothing of what is computed with them.
Invariants: shards are taken in the announced order; a shard read ahead counts as active. A pass
takes each shard before it stages the next version of it, so that one read early is never stale.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Literal, Protocol

import numpy as np

from shardb.views import ShardView
from trainer.prefetch import Prefetch
from trainer.timing import StepClock

Kind = Literal["params", "optim"]
PAGE_BYTES = 4096


class ShardReader(Protocol):
    """What gives shards by name: a transaction or a read view."""

    def read(self, name: str) -> ShardView:
        """Give the immutable shard."""
        ...


class ShardWindow:
    """Hands out the shards of a pass one after the other, reading `prefetch.window` of them ahead.

    `lock` is held around every call into `reader`; whoever uses the same transaction while a window
    is open takes it too, because a transaction is not asked to serve two threads at once.
    """

    def __init__(
        self, reader: ShardReader, order: Sequence[str], *, prefetch: Prefetch, clock: StepClock
    ) -> None:
        self.lock = threading.Lock()
        self.active_max: dict[Kind, int] = {"params": 0, "optim": 0}
        self._active: dict[Kind, int] = {"params": 0, "optim": 0}
        self._reader = reader
        self._order = list(order)
        self._position = 0
        self._clock = clock
        self._prefetch = prefetch
        self._scheduled = 0  # everything before it in the order was taken, read ahead or left out
        self._ahead: deque[tuple[str, Future[ShardView]]] = deque()
        self._executor = ThreadPoolExecutor(1, "read-ahead") if prefetch.window else None

    def __enter__(self) -> ShardWindow:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
        assert error is not None or self._position == len(self._order), "a shard was not visited"

    @contextmanager
    def take(self, name: str) -> Iterator[ShardView]:
        """Give the next shard, which must be `name`, until the block ends."""
        assert self._order[self._position] == name, (self._order[self._position], name)
        kind = _kind_of(name)
        self._position += 1
        self._scheduled = max(self._scheduled, self._position)
        bucket = "param_load_seconds" if kind == "params" else "optimizer_load_seconds"
        with self._clock.measure(bucket):
            view = self._next(name, kind)
        self._read_ahead()
        try:
            yield view
        finally:
            self._active[kind] -= 1

    def _next(self, name: str, kind: Kind) -> ShardView:
        if self._ahead and self._ahead[0][0] == name:
            return self._ahead.popleft()[1].result()
        self._enter(kind)
        return self._read(name)

    def _read_ahead(self) -> None:
        """Keep as many reads in flight as the window allows; each counts as active from here on."""
        if self._executor is None:
            return
        while len(self._ahead) < self._prefetch.window and self._scheduled < len(self._order):
            name = self._order[self._scheduled]
            self._scheduled += 1
            kind = _kind_of(name)
            if kind == "params" or self._prefetch.optimizer_shards:
                self._enter(kind)
                self._ahead.append((name, self._executor.submit(self._bring_nearer, name)))

    def _enter(self, kind: Kind) -> None:
        self._active[kind] += 1
        self.active_max[kind] = max(self.active_max[kind], self._active[kind])

    def _read(self, name: str) -> ShardView:
        with self.lock:
            return self._reader.read(name)

    def _bring_nearer(self, name: str) -> ShardView:
        view = self._read(name)
        # One byte a page brings the whole mapping into memory; numpy lets other threads run.
        np.add.reduce(view.image[::PAGE_BYTES], dtype=np.uint64)
        if self._prefetch.send is not None and _kind_of(name) == "params":
            self._prefetch.send(view)
        return view


def _kind_of(name: str) -> Kind:
    return "optim" if name.startswith("optim/") else "params"
