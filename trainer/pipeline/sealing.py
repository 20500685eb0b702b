"""Sealing staged shards when their copies have arrived, behind the back of the step.

Owns one thread a lane that copies out. The store's writers digest an image while it arrives, so
that a commit waits for the digests of what came last alone. Knows nothing of what is copied. The
first error of a seal is raised by `drain`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from shardb.views import StagedShard
from trainer.device_lanes import Lane, Lanes, Mark


class HostMark:
    """The end of work in a thread of the host; its error is raised where it is waited for."""

    def __init__(self, done: Future[None] | None) -> None:
        self._done = done

    def arrive(self) -> None:
        """Return when it is done."""
        if self._done is not None:
            self._done.result()


class Sealer:
    """Seals a lane's shards in order; on the host at once, in the caller's thread."""

    def __init__(self, lanes: Lanes, *, in_background: bool) -> None:
        self._lanes = lanes
        self._executors = (
            {lane: ThreadPoolExecutor(1, f"sealer {lane}") for lane in (Lane.OUT, Lane.OUT_LATER)}
            if in_background
            else {}
        )
        self._updates: ThreadPoolExecutor | None = None
        self._pending: deque[Future[None]] = deque()

    def seal(self, lane: Lane, shards: Sequence[StagedShard]) -> None:
        """Seal shards once what a lane was asked for so far is done."""
        arrived = self._lanes.mark(lane, for_host=True)
        executor = self._executors.get(lane)
        if executor is None:
            self._seal(arrived, shards)
        else:
            self._pending.append(executor.submit(self._seal, arrived, shards))

    def fill(self, lane: Lane, sizes: Sequence[tuple[StagedShard, int]]) -> None:
        """Tell shards up to where they are complete, once what a lane was asked for is done."""
        arrived = self._lanes.mark(lane, for_host=True)
        executor = self._executors.get(lane)
        if executor is None:
            self._fill(arrived, sizes)
        else:
            self._pending.append(executor.submit(self._fill, arrived, sizes))

    def run(self, work: Callable[[], None]) -> HostMark:
        """Do some work, which seals its shards itself, in a thread of its own."""
        if not self._executors:
            work()
            return HostMark(None)
        if self._updates is None:
            self._updates = ThreadPoolExecutor(1, "updates")
        future = self._updates.submit(work)
        self._pending.append(future)
        return HostMark(future)

    def drain(self) -> None:
        """Return when everything is sealed."""
        while self._pending:
            self._pending.popleft().result()

    def abandon(self) -> None:
        """Wait for what runs and forget what waits, after an error."""
        while self._pending:
            pending = self._pending.popleft()
            if not pending.cancel():
                pending.exception()

    def close(self) -> None:
        """End the threads."""
        for executor in (*self._executors.values(), self._updates):
            if executor is not None:
                executor.shutdown(wait=True)

    def _seal(self, arrived: Mark | None, shards: Sequence[StagedShard]) -> None:
        self._lanes.arrive(arrived)
        for shard in shards:
            shard.seal()

    def _fill(self, arrived: Mark | None, sizes: Sequence[tuple[StagedShard, int]]) -> None:
        self._lanes.arrive(arrived)
        for shard, size_bytes in sizes:
            shard.filled(size_bytes)
