"""Background writing of sealed images, with a bounded queue.

Owns the writer threads of one store. A sealed image is written to a staged file while the caller
goes on; `submit` blocks when `max_pending` images wait, so that the queue cannot grow without
bound. The first failure is kept and raised by the next call. Without threads nothing is in the
background: `submit` returns when the image is written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class CallerExecutor(Executor):
    """Does the work at once, in the thread that asks for it."""

    def submit(self, work: Callable[..., T], /, *args: Any, **named: Any) -> Future[T]:
        """Give a future that is done."""
        future: Future[T] = Future()
        try:
            future.set_result(work(*args, **named))
        except Exception as error:  # noqa: BLE001 - raised where the result is asked for
            future.set_exception(error)
        return future


class BackgroundWriter:
    """A few threads and a limit on what waits for them."""

    def __init__(self, *, threads: int, max_pending: int) -> None:
        assert threads >= 0
        assert max_pending > 0
        self._pool: Executor = (
            ThreadPoolExecutor(threads, thread_name_prefix="shardb-writer")
            if threads
            else CallerExecutor()
        )
        self._slots = threading.BoundedSemaphore(max_pending)
        self._pending = 0
        self._lock = threading.Lock()

    @property
    def pending(self) -> int:
        """Images that are being written or wait for it."""
        return self._pending

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` in the background; blocks while the queue is full."""
        self._slots.acquire()
        with self._lock:
            self._pending += 1
        try:
            return self._pool.submit(self._run, work)
        except BaseException:
            self._done()
            raise

    def start(self, work: Callable[[], None]) -> None:
        """Run a part of work that is yet to be submitted: it counts as nothing that waits."""
        self._pool.submit(work)

    def map(self, work: Callable[[T], None], items: Iterable[T]) -> None:
        """Run `work` on every item, in parallel; waits for all, raises the first failure."""
        futures = [self._pool.submit(work, item) for item in items]
        failures = [f.exception() for f in futures]
        for failure in failures:
            if failure is not None:
                raise failure

    def _run(self, work: Callable[[], T]) -> T:
        try:
            return work()
        finally:
            self._done()

    def _done(self) -> None:
        with self._lock:
            self._pending -= 1
        self._slots.release()

    def close(self) -> None:
        self._pool.shutdown(wait=True)
