"""A watchdog that says what waits for what, when something waits for too long.

Owns one thread and the moment of speaking. It ends nothing and retries nothing: a disk that is slow
may still answer. Knows nothing of what is waited for; whoever waits gives the words.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

from shardb.durations import duration

WAIT_SECONDS = 60.0


@dataclass(kw_only=True, slots=True)
class _Wait:
    """A wait in progress; `told` counts how often it was spoken of."""

    words: Callable[[], str]
    began: float
    told: int = 0


class Watchdog:
    """Speaks when a watched block takes longer than `wait_seconds`, and again each time as long."""

    def __init__(self, say: Callable[[str], None], *, wait_seconds: float = WAIT_SECONDS) -> None:
        self._say = say
        self._wait_seconds = wait_seconds
        self._wait: _Wait | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def watching(self, words: Callable[[], str]) -> Iterator[None]:
        """Watch a block; `words` says who waits for what, and is called in another thread."""
        outer, self._wait = self._wait, _Wait(words=words, began=time.monotonic())
        try:
            yield
        finally:
            self._wait = outer

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        # It looks a few times a wait, so that watching costs a step nothing.
        while not self._ended.wait(self._wait_seconds / 4):
            wait = self._wait
            if wait is None:
                continue
            seconds = time.monotonic() - wait.began
            if seconds > self._wait_seconds * (wait.told + 1):
                wait.told += 1
                self._say(f"warning: waiting for {duration(seconds)}: {wait.words()}")

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
