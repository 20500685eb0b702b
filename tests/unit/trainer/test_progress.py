"""Are the lines that scripts read in their fixed form, and does a lost reader not end a run?"""

from __future__ import annotations

import io
import os
from typing import Any

from trainer.progress import LiveProgress, PlainProgress, TimeLeft, curve, plain_line


def line(step: int = 12, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 5.21336,
        "durable_step": step,
        "learning_rate": 3e-4,
        "grad_norm": 1.5,
        "tokens_per_second": 1234.4,
        "tokens_seen": 4096,
        "seconds": 2.0,
        **more,
    }


def test_the_line_begins_as_scripts_expect() -> None:
    assert plain_line(line(), 65.0) == (
        "step=12 loss=5.2134 durable=12 lr=0.0003 grad_norm=1.5000 tok/s=1234 eta=1min05s"
    )


def test_what_is_only_sometimes_there_stands_behind() -> None:
    told = plain_line(line(ceiling_percent=12.34, publish_pending=1), None)
    assert told.endswith(" tok/s=1234 ceiling=12.3% publishing=1")
    assert "publishing" not in plain_line(line(publish_pending=0), None)


def test_a_validation_is_in_its_steps_line() -> None:
    text = plain_line(line(validation_loss=5.0), None)
    assert "validation_loss=5.0000" in text
    assert "eta" not in text


def test_the_time_left_is_that_of_the_last_steps() -> None:
    left = TimeLeft(10)
    assert left.after(4, 2.0) == 12.0
    assert left.after(5, 4.0) == 15.0
    assert left.after(12, 4.0) == 0.0
    assert TimeLeft(None).after(1, 1.0) is None


def test_a_closed_pipe_is_noted_once_and_survived() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    notes = io.StringIO()
    with os.fdopen(writing, "w") as out:
        progress = PlainProgress(out, notes, 20)
        for step in (1, 2, 3):
            progress.step(line(step))
    assert notes.getvalue().count("standard output was closed") == 1


def test_the_curve_goes_from_the_highest_bar_to_the_lowest() -> None:
    assert curve([8.0, 4.5, 1.0]) == "█▅▁"
    assert curve([2.0, 2.0]) == "▁▁"


def test_the_panel_draws_every_number() -> None:
    progress = LiveProgress(20, validates=True)
    progress.step(line(validation_loss=4.0))
    progress.close()
    table = progress._panel(line(), 9.0)
    assert table.row_count == 8
