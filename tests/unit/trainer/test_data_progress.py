"""Does progress show how far, how fast and how long, and stay plain where nobody looks?"""

from __future__ import annotations

import io

import pytest

from trainer.data import progress
from trainer.data.progress import TextProgress, progress_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def run(shown: TextProgress, clock: Clock) -> None:
    shown.begin("encoding", 40_000_000)
    for _ in range(40):
        clock.now += 0.5
        shown.advance(1_000_000)
    shown.end()
    shown.note("done")


def test_does_a_line_tell_how_far_how_fast_how_long() -> None:
    line = progress_line("encoding", 10_000_000, 40_000_000, 5.0)
    assert line == "encoding: 10.0 of 40.0 MB (25 %), 2.0 MB/s, 15 s left"


def test_is_a_line_of_nothing_yet_no_division_by_zero() -> None:
    assert progress_line("reading", 0, 0, 0.0) == (
        "reading: 0.0 of 0.0 MB (100 %), 0.0 MB/s, unknown left"
    )


def test_are_there_few_plain_lines_when_piped(clock: Clock) -> None:
    out = io.StringIO()
    run(TextProgress(out), clock)
    lines = out.getvalue().split("\n")
    assert lines[0] == "encoding: 10.0 of 40.0 MB (25 %), 2.0 MB/s, 15 s left"
    assert lines[-3:] == ["encoding: 40.0 MB in 20 s (2.0 MB/s)", "done", ""]
    assert 4 <= len(lines) <= 8
    assert "\x1b" not in out.getvalue()
    assert "\r" not in out.getvalue()


def test_is_one_line_redrawn_on_a_terminal(clock: Clock) -> None:
    out = Terminal()
    run(TextProgress(out), clock)
    assert out.getvalue().count("\r\x1b[K") == 42
    assert out.getvalue().count("\n") == 2
