"""What a person sees while a run trains: one plain line a step, or a live panel on a terminal.

Owns the words and numbers shown and the estimate of the time left. Knows nothing of the store; it
is told of a step after that step's commit. Invariant: a line on standard output means that its step
is committed.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from shardb.durations import duration

# Steps over which speed and time left are averaged: long enough to smooth a validation.
SPEED_WINDOW_STEPS = 50
CURVE_STEPS = 40
BARS = "▁▂▃▄▅▆▇█"


class Progress(Protocol):
    """Shows a run's steps."""

    def step(self, line: Mapping[str, Any]) -> None:
        """Show a step that is committed; `line` is its line of the step log."""

    def note(self, text: str) -> None:
        """Say something that is no step."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class TimeLeft:
    """Estimates the seconds until the stop from the last steps."""

    def __init__(self, max_steps: int | None) -> None:
        self._max_steps = max_steps
        self._seconds: deque[float] = deque(maxlen=SPEED_WINDOW_STEPS)

    def after(self, step: int, seconds: float) -> float | None:
        """Take in one step and give the seconds left; None for a run without a stop."""
        self._seconds.append(seconds)
        if self._max_steps is None:
            return None
        mean = sum(self._seconds) / len(self._seconds)
        return max(0, self._max_steps - step) * mean


class PlainProgress:
    """One flushed line a step, for files, pipes and logs."""

    def __init__(self, out: TextIO, notes: TextIO, max_steps: int | None) -> None:
        self._out = out
        self._notes = notes
        self._time_left = TimeLeft(max_steps)

    def step(self, line: Mapping[str, Any]) -> None:
        """Print the step's line; a reader that went away does not end the run."""
        left = self._time_left.after(line["step"], line["seconds"])
        try:
            print(plain_line(line, left), file=self._out, flush=True)
        except BrokenPipeError:
            # Python would try again at exit: give it somewhere to write to.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._out.fileno())
            self.note("standard output was closed; the run goes on, see logs/steps.jsonl")

    def note(self, text: str) -> None:
        """Print to the second stream, so that the first holds steps alone."""
        print(text, file=self._notes, flush=True)

    def close(self) -> None:
        """Nothing was changed."""


class LiveProgress:
    """A panel that is redrawn in place."""

    def __init__(self, max_steps: int | None, *, validates: bool) -> None:
        self._max_steps = max_steps
        self._time_left = TimeLeft(max_steps)
        self._losses: deque[float] = deque(maxlen=CURVE_STEPS)
        self._validation = "not yet" if validates else "off: no --val-data-dir"
        self._live = Live(console=Console(), auto_refresh=False, transient=False)
        self._live.start()

    def step(self, line: Mapping[str, Any]) -> None:
        """Redraw with the step's numbers."""
        left = self._time_left.after(line["step"], line["seconds"])
        self._losses.append(line["loss"])
        if "validation_loss" in line:
            self._validation = f"{line['validation_loss']:.4f} (step {line['step']:,})"
        self._live.update(self._panel(line, left), refresh=True)

    def note(self, text: str) -> None:
        """Print above the panel."""
        self._live.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Leave the last panel standing and give the cursor back."""
        self._live.stop()

    def _panel(self, line: Mapping[str, Any], left: float | None) -> Table:
        stop = "" if self._max_steps is None else f" of {self._max_steps:,}"
        table = Table.grid(padding=(0, 2))
        table.add_column(justify="right", style="dim")
        table.add_column()
        table.add_row("step", f"{line['step']:,}{stop}")
        table.add_row("loss", f"{line['loss']:.4f}  {curve(self._losses)}")
        table.add_row("validation loss", self._validation)
        table.add_row("learning rate", f"{line['learning_rate']:.3g}")
        table.add_row("tokens", f"{line['tokens_seen']:,}")
        table.add_row("tokens/s", f"{line['tokens_per_second']:,.0f}{_of_ceiling(line)}")
        table.add_row("time left", "until interrupted" if left is None else duration(left))
        publishing = "  another is being published" if line.get("publish_pending") else ""
        table.add_row("durable step", f"{line['durable_step']:,}{publishing}")
        return table


def progress_for(max_steps: int | None, *, validates: bool) -> Progress:
    """Choose by whether standard output is a terminal."""
    if sys.stdout.isatty():
        return LiveProgress(max_steps, validates=validates)
    return PlainProgress(sys.stdout, sys.stderr, max_steps)


def note_before(text: str) -> None:
    """Say something before a run's progress is shown."""
    print(text, file=sys.stderr, flush=True)


def plain_line(line: Mapping[str, Any], seconds_left: float | None) -> str:
    """Give `step=12 loss=5.2134 durable=12 …`: words without spaces, in a fixed order."""
    parts = [
        f"step={line['step']}",
        f"loss={line['loss']:.4f}",
        f"durable={line['durable_step']}",
        f"lr={line['learning_rate']:.6g}",
        f"grad_norm={line['grad_norm']:.4f}",
        f"tok/s={line['tokens_per_second']:.0f}",
    ]
    if "ceiling_percent" in line:
        parts.append(f"ceiling={line['ceiling_percent']:.1f}%")
    if "validation_loss" in line:
        parts.append(f"validation_loss={line['validation_loss']:.4f}")
    if line.get("publish_pending"):
        parts.append("publishing=1")
    if seconds_left is not None:
        parts.append(f"eta={duration(seconds_left).replace(' ', '')}")
    return " ".join(parts)


def _of_ceiling(line: Mapping[str, Any]) -> str:
    percent = line.get("ceiling_percent")
    return "" if percent is None else f"  {percent:.1f} % of what this machine can do"


def curve(losses: Sequence[float]) -> str:
    """Draw the last losses, one bar a step, between their lowest and highest."""
    low, high = min(losses), max(losses)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((loss - low) * scale)] for loss in losses)
