"""Does the watchdog speak when a wait is long, say what waits for what, and only then?"""

from __future__ import annotations

import threading

import pytest

from trainer.watchdog import Watchdog

LONG_SECONDS = 30


class Listener:
    """Collects what is said, and lets a test wait for it."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.spoken = threading.Event()

    def say(self, text: str) -> None:
        self.texts.append(text)
        if len(self.texts) >= 2:
            self.spoken.set()


def test_a_long_wait_is_told_again_and_again() -> None:
    listener = Listener()
    with (
        Watchdog(listener.say, wait_seconds=0.02) as watchdog,
        watchdog.watching(lambda: "step 5 waits for the disk"),
    ):
        assert listener.spoken.wait(LONG_SECONDS)
    assert listener.texts[0].startswith("warning: waiting for ")
    assert listener.texts[0].endswith(": step 5 waits for the disk")


def test_short_waits_are_not_told() -> None:
    listener = Listener()
    with Watchdog(listener.say, wait_seconds=LONG_SECONDS) as watchdog:
        for _ in range(1000):
            with watchdog.watching(lambda: "nothing"):
                pass
    assert listener.texts == []


def test_between_waits_nothing_is_told() -> None:
    listener = Listener()
    with Watchdog(listener.say, wait_seconds=0.01) as watchdog:
        with watchdog.watching(lambda: "over at once"):
            pass
        listener.spoken.wait(0.1)
    assert listener.texts == []


def test_a_wait_inside_another_is_the_one_that_is_told_and_then_the_outer() -> None:
    listener, inner = Listener(), Listener()
    with Watchdog(listener.say, wait_seconds=0.02) as watchdog, watchdog.watching(lambda: "outer"):
        with watchdog.watching(lambda: "inner"):
            assert listener.spoken.wait(LONG_SECONDS)
        listener.say = inner.say  # type: ignore[method-assign]
        listener.spoken.clear()
        assert all(text.endswith("inner") for text in listener.texts[:2])
        assert listener.spoken.wait(LONG_SECONDS)
    assert listener.texts[-1].endswith("outer")


def test_an_error_ends_the_wait() -> None:
    listener = Listener()
    with Watchdog(listener.say, wait_seconds=0.02) as watchdog:
        with pytest.raises(ValueError, match="no"), watchdog.watching(lambda: "failing"):
            raise ValueError("no")
        listener.spoken.wait(0.1)
    assert listener.texts == []
