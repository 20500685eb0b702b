"""What a client may ask of the server at most.

Owns the numbers, the count of answers being made and the comparison of API keys. Knows nothing of
HTTP. Invariants: every answer that was admitted is counted until it ends; comparing a key takes the
same time wherever it differs.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Sequence
from dataclasses import dataclass

from serve.errors import ApiError, overloaded

RETRY_SECONDS_MAX = 60
# Weight of the newest request in the mean time that the wait of a refused client is guessed from.
MEAN_WEIGHT = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The numbers; each has a flag of its name.

    answers_running: answers that the scheduler makes at once; answers_queued: those that may wait
    beside them; max_tokens: tokens of one answer, 0 for as many as fit the model's window.
    """

    answers_running: int = 64
    answers_queued: int = 256
    body_bytes: int = 4 << 20
    body_seconds: float = 30.0
    header_seconds: float = 10.0
    request_seconds: float = 600.0
    reader_seconds: float = 30.0
    keep_alive_seconds: float = 5.0
    connections: int = 1024
    max_tokens: int = 0


class Admission:
    """Counts the answers being made; used from the event loop alone."""

    def __init__(self, limits: Limits) -> None:
        self._capacity = limits.answers_running + limits.answers_queued
        self._mean_seconds = 1.0
        self.active = 0
        self.refused = 0
        self.is_stopping = False

    def enter(self, answers: int) -> Ticket:
        """Count answers in; ApiError when there is no room, with the time after which there may be.

        A request alone is always let in, however many answers it wants.
        """
        if self.active and self.active + answers > self._capacity:
            self.refused += 1
            seconds = min(RETRY_SECONDS_MAX, max(1, round(self._mean_seconds)))
            raise overloaded(
                f"{self.active} answers are being made or wait, {self._capacity} may: try again"
                f" in {seconds} s",
                retry_seconds=seconds,
            )
        self.active += answers
        return Ticket(self, answers)

    def left(self, answers: int, seconds: float) -> None:
        """Count answers out."""
        self.active -= answers
        assert self.active >= 0, "left more often than entered"
        self._mean_seconds += MEAN_WEIGHT * (seconds - self._mean_seconds)


class Ticket:
    """Answers that were counted in."""

    def __init__(self, admission: Admission, answers: int) -> None:
        self._admission = admission
        self._answers = answers
        self._began = time.monotonic()

    def leave(self) -> None:
        """Count them out; once is enough."""
        if self._answers:
            self._admission.left(self._answers, time.monotonic() - self._began)
        self._answers = 0


def check_key(keys: Sequence[str], authorization: str | None) -> None:
    """Refuse a request without one of the keys; without keys everybody is let in."""
    if not keys:
        return
    scheme, _, given = (authorization or "").partition(" ")
    given = given.strip() if scheme.lower() == "bearer" else ""
    # Every key is compared, so that the time does not tell which one was nearly right.
    matches = [hmac.compare_digest(key.encode(), given.encode()) for key in keys]
    if not any(matches):
        fault = "Incorrect API key provided." if given else "You didn't provide an API key."
        raise ApiError(
            401,
            f"{fault} Send it in the header 'Authorization: Bearer KEY'.",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
