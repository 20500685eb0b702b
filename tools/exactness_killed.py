"""Runs that are killed and go on: does each commit have the bytes of a run never killed?

Owns the processes: the command `train` in a process of its own, ended by SIGKILL somewhere in the
step after one that it announced, and started again by `--store` alone. Knows nothing of how cells
are chosen. Invariant: what is compared is the log of every store, where each commit names the
digest of each of its shards.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any, TextIO

from tools.exactness_cells import Cell
from tools.exactness_runs import STEPS, Places, given_of, unlike_commits
from trainer.recipe_build import Given
from trainer.signals import StopRequest
from trainer.start import train

WAIT_SECONDS = 120.0
# A kill comes up to so much later than the announcement of a step: about one step.
DELAY_SECONDS_MAX = 0.04


@dataclass(frozen=True, kw_only=True)
class Kill:
    """End the process `delay_seconds` after it announced a step."""

    step: int
    delay_seconds: float


@dataclass(frozen=True, kw_only=True)
class Killed:
    """A run that was killed: at which steps it was met, and what differs from one never killed."""

    kills: int
    differences: list[str]


def kills_of(cell: Cell, seed: int, count: int = 2) -> list[Kill]:
    """Draw at which steps a cell is killed."""
    draw = random.Random(f"{seed} {cell.name}")
    steps = sorted(draw.sample(range(1, STEPS - 1), count))
    return [Kill(step=step, delay_seconds=draw.random() * DELAY_SECONDS_MAX) for step in steps]


def killed(
    context: ForkServerContext,
    cell: Cell,
    places: Places,
    device: str,
    *,
    kills: Sequence[Kill],
    unbroken: Mapping[int, Mapping[str, str]],
    resumed_with: Given | None = None,
) -> Killed:
    """Train, kill, go on as often as asked, then to the end; compare every commit.

    `resumed_with` are more flags for going on: a control's.
    """
    given = given_of(cell, places, device)
    again = {"store": given["store"], **(resumed_with or {})}
    met = 0
    try:
        for number, kill in enumerate(kills):
            met += _run(context, again if number else given, kill) == -9
        code = _run(context, again, None)
        ended = [] if code == 0 else [f"the run that went on ended with exit code {code}"]
        return Killed(kills=met, differences=ended + unlike_commits(given, unbroken))
    finally:
        places.remove()


def leave_signals_to_parent() -> None:
    """Let an interrupt of the whole group end the process that waits for this one, alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _run(context: ForkServerContext, given: Given, kill: Kill | None) -> int:
    """Run `train` in a process; give its exit code, -9 when it was killed."""
    reading, writing = context.Pipe(duplex=False)
    process = context.Process(target=_train, args=(dict(given), writing), daemon=True)
    process.start()
    writing.close()
    with os.fdopen(os.dup(reading.fileno()), encoding="utf-8") as lines:
        reading.close()
        _watch(lines, process.kill, kill)
    process.join(WAIT_SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(f"a run did not end within {WAIT_SECONDS:.0f} s: {given}")
    return process.exitcode


def _watch(lines: TextIO, end: Any, kill: Kill | None) -> None:
    """Read until the process closes its output; end it when its step has come."""
    for line in lines:
        if kill is not None and line.startswith(f"step={kill.step} "):
            time.sleep(kill.delay_seconds)
            end()
            kill = None


def _train(given: dict[str, Any], writing: Connection) -> None:
    """Be the command: steps go to the pipe, everything else nowhere; who waits ends it."""
    leave_signals_to_parent()
    os.dup2(writing.fileno(), 1)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    writing.close()
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.exit(train(given, StopRequest(), _say))


def _say(text: str) -> None:
    """Answer as the command does."""
    sys.stdout.write(f"{text}\n")
