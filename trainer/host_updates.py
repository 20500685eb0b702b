"""Updates that run on the processor, in a thread of their own, while the device goes on.

Owns the thread and how many updates may wait in it. Knows nothing of what an update is. Invariants:
updates run in the order in which they were given; the first error of one is raised by the next
call; after `finish` returned, all of them are done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

PENDING_MAX = 2


class HostUpdates:
    """One thread, at work once there is something to do."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._pending: deque[Future[None]] = deque()
        self.pending_max = 0

    def give(self, work: Callable[[], None]) -> None:
        """Let the thread do some work; wait while as much as may wait is waiting."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "updates")
        while len(self._pending) >= PENDING_MAX:
            self._pending.popleft().result()
        self._pending.append(self._executor.submit(work))
        self.pending_max = max(self.pending_max, len(self._pending))

    def finish(self) -> None:
        """Wait for all that was given."""
        while self._pending:
            self._pending.popleft().result()

    def close(self) -> None:
        """End the thread; what waits in it after an error is not begun."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
