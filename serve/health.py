"""Whether the server can answer: proved by reading, not by being alive.

Owns the two proofs. A shard of every served commit is read and its digest checked, another one at
each look; and a scheduler that has requests makes sweeps. Knows nothing of HTTP. Invariants: a look
is at most one at a time and at most one a period, so that asking often costs nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from serve.catalogue import Catalogue, ServedStore
from serve.errors import ApiError, of_store
from serve.statistics import SchedulerStatistics
from shardb.errors import ShardbError

LOOK_SECONDS = 1.0
LOOK_SECONDS_MAX = 20.0
STALLED_SECONDS = 60.0


class SweepWatch:
    """Notices a scheduler that has requests and makes no sweep."""

    def __init__(self, *, stalled_seconds: float = STALLED_SECONDS) -> None:
        self._stalled_seconds = stalled_seconds
        self._sweeps = -1
        self._since = 0.0

    def seconds_without_sweep(self, now: SchedulerStatistics, moment: float) -> float:
        """Give for how long requests have been waiting without any sweep."""
        is_busy = now.requests_running + now.requests_waiting > 0
        if not is_busy or now.sweeps != self._sweeps:
            self._sweeps, self._since = now.sweeps, moment
        return moment - self._since

    def check(self, now: SchedulerStatistics, moment: float) -> None:
        """Raise where nothing moves."""
        seconds = self.seconds_without_sweep(now, moment)
        if seconds > self._stalled_seconds:
            raise ApiError(
                503,
                f"requests are waiting, and no sweep has ended for {seconds:.0f} s",
                code="stalled",
            )


class Health:
    """The last look, and the next one."""

    def __init__(self, catalogue: Catalogue, statistics: Callable[[], SchedulerStatistics]) -> None:
        self._catalogue = catalogue
        self._statistics = statistics
        self._looking = asyncio.Lock()
        self._looked = -LOOK_SECONDS
        self._found: dict[str, Any] | ApiError = {}
        self.watch = SweepWatch()

    async def look(self) -> dict[str, Any]:
        """Say what is served and was verified; ApiError with 503 when it cannot be."""
        async with self._looking:
            if time.monotonic() - self._looked >= LOOK_SECONDS:
                self._found = await self._look_now()
                self._looked = time.monotonic()
        if isinstance(self._found, ApiError):
            raise self._found
        return self._found

    async def _look_now(self) -> dict[str, Any] | ApiError:
        try:
            self.watch.check(self._statistics(), time.monotonic())
            work = asyncio.to_thread(verified, self._catalogue)
            return {"status": "ok", "models": await asyncio.wait_for(work, LOOK_SECONDS_MAX)}
        except TimeoutError:
            text = f"no shard could be read within {LOOK_SECONDS_MAX:g} s"
            return ApiError(503, text, code="storage_slow")
        except ApiError as error:
            return error


def verified(catalogue: Catalogue) -> dict[str, Any]:
    """Read and check a shard of what every role means now."""
    return {store.role: _verified(store) for store in catalogue.stores}


def _verified(store: ServedStore) -> dict[str, Any]:
    try:
        pinned = store.current()
    except ShardbError as error:
        raise _not_ready(error, store.role) from error
    try:
        shard = pinned.verify_shard()
    except ShardbError as error:
        raise _not_ready(error, pinned.commit.id) from error
    finally:
        pinned.release()
    commit = pinned.commit
    return {
        "store": store.name,
        "commit": commit.id,
        "step": commit.step,
        "branch": commit.branch,
        "verified_shard": shard,
    }


def _not_ready(error: ShardbError, what: str) -> ApiError:
    """A server that cannot read is not ready, whatever the reason."""
    told = of_store(error, what)
    return ApiError(503, told.message, code=told.code)
