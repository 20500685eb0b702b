"""One request's answers while they are made: from the scheduler's thread to the event loop.

Owns the mailbox between the two and the end of every job. Knows nothing of HTTP bodies. Invariants:
whatever ends a generation (its last token, a stop string, a client that left, a deadline, an
error), every job of it is cancelled and the model released; a mailbox never holds more than its
limit.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from serve.catalogue import Model
from serve.choice import Choice, Piece
from serve.errors import ApiError, of_store
from serve.pinned import PinnedModel
from serve.requests import Event, SamplingParameters, Sink
from serve.sampling_fields import Wanted
from serve.statistics import SchedulerStatistics
from serve.stop_strings import StopStrings
from shardb.errors import ShardbError, UsageError

MAILBOX_EVENTS_MAX = 4096


class Running(Protocol):
    """A submitted request."""

    def cancel(self) -> None: ...


class Scheduling(Protocol):
    """What this side needs of a scheduler."""

    def submit(
        self,
        pinned: PinnedModel,
        prompt_ids: Sequence[int],
        parameters: SamplingParameters,
        sink: Sink,
    ) -> Running: ...

    def statistics(self) -> SchedulerStatistics: ...

    def preload(self, pinned: PinnedModel) -> None: ...

    def close(self, drain: bool = True, timeout_seconds: float = 30.0) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One answer to make: a prompt in tokens, as it was given where that was text, and its end."""

    prompt_ids: Sequence[int]
    parameters: SamplingParameters
    stops: tuple[str, ...] = ()
    text: str | None = None


class Mailbox:
    """Events on their way from the worker thread to the event loop, in order and bounded."""

    def __init__(self, limit: int = MAILBOX_EVENTS_MAX) -> None:
        self._loop = asyncio.get_running_loop()
        self._limit = limit
        self._lock = threading.Lock()
        self._events: deque[tuple[int, Event]] = deque()
        self._woken = asyncio.Event()
        self.is_full = False

    def post(self, index: int, event: Event) -> bool:
        """Put an event in, from any thread; False when it was dropped because nobody reads."""
        with self._lock:
            self.is_full = self.is_full or len(self._events) >= self._limit
            if not self.is_full:
                self._events.append((index, event))
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._woken.set)
        return not self.is_full

    async def get(self, deadline: float) -> tuple[int, Event]:
        """Take the next event out; ApiError past the deadline and when events were dropped."""
        while True:
            with self._lock:
                if self._events:
                    return self._events.popleft()
            if self.is_full:
                raise ApiError(408, "the client reads too slowly", code="slow_reader")
            self._woken.clear()
            if self._events:
                continue
            try:
                await asyncio.wait_for(self._woken.wait(), deadline - time.monotonic())
            except TimeoutError as error:
                raise ApiError(
                    503, "the request took longer than this server allows", code="timeout"
                ) from error


class Generation:
    """The answers of one request; use `pieces` once, or `close` it."""

    def __init__(
        self,
        scheduler: Scheduling,
        model: Model,
        plans: Sequence[Plan],
        wanted: Wanted,
        *,
        timeout_seconds: float,
    ) -> None:
        """Submit every plan; where one is refused, none goes on.

        Raises:
            ApiError: the scheduler refuses a plan.
        """
        self.model = model
        self.plans = plans
        self.began = time.monotonic()
        self.first_token_seconds: float | None = None
        self._deadline = self.began + timeout_seconds
        self._mailbox = Mailbox()
        self._jobs: list[Running] = []
        self.choices = [
            Choice(
                index,
                model.words.vocabulary,
                StopStrings(plan.stops, include=wanted.include_stop),
                skip_special=wanted.skip_special,
            )
            for index, plan in enumerate(plans)
        ]
        try:
            for index, plan in enumerate(plans):
                self._jobs.append(self._submit(scheduler, index, plan))
        except UsageError as error:
            self.close()
            raise ApiError(400, error.message, code="invalid_value") from error
        except BaseException:
            self.close()
            raise

    async def pieces(self) -> AsyncIterator[Piece]:
        """Give the pieces of all answers as they come, until each has its end.

        Raises:
            ApiError: an answer cannot be finished; what was said before stands.
        """
        try:
            while any(choice.finish is None for choice in self.choices):
                index, event = await self._mailbox.get(self._deadline)
                if self.first_token_seconds is None:
                    self.first_token_seconds = time.monotonic() - self.began
                piece = self.choices[index].take(event)
                if self.choices[index].finish is not None:
                    self._jobs[index].cancel()
                if piece is not None:
                    yield piece
        except ShardbError as error:
            raise of_store(error, self.model.fingerprint) from error
        finally:
            self.close()

    def close(self) -> None:
        """Cancel what still runs; finished jobs do not mind."""
        for job in self._jobs:
            job.cancel()

    @property
    def prompt_tokens(self) -> int:
        """Count every different prompt once."""
        return sum({id(plan.prompt_ids): len(plan.prompt_ids) for plan in self.plans}.values())

    @property
    def completion_tokens(self) -> int:
        """Count the tokens of every answer, those in a stop string included."""
        return sum(choice.token_count for choice in self.choices)

    def _submit(self, scheduler: Scheduling, index: int, plan: Plan) -> Running:
        def sink(event: Event) -> None:
            if not self._mailbox.post(index, event):
                self.close()

        return scheduler.submit(self.model.pinned, plan.prompt_ids, plan.parameters, sink)
