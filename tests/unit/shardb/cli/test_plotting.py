"""Is a curve drawn where its values are, spikes and all?"""

from __future__ import annotations

import math

from shardb.cli.plotting import draw

BLANK = {" ", "\u2800"}


def body(lines: list[str], height: int) -> list[str]:
    """The drawing area of a plot."""
    return [line.split("|", 1)[1] for line in lines[1 : 1 + height]]


def test_does_a_falling_line_fall() -> None:
    lines = draw({"loss": [(x, -x) for x in range(100)]}, width=60, height=10)
    area = body(lines, 10)
    assert all(len(line) <= 60 for line in lines)
    assert area[0][0] not in BLANK
    assert area[-1][-1] not in BLANK
    filled = [[at for at, cell in enumerate(row) if cell not in BLANK] for row in area]
    assert all(filled)
    assert [min(row) for row in filled] == sorted(min(row) for row in filled)


def test_is_a_spike_seen_among_very_many_points() -> None:
    points = [(float(x), 1.0) for x in range(50_000)]
    points[33_333] = (33_333.0, 9.0)
    area = body(draw({"loss": points}, width=80, height=8), 8)
    assert len(area[0].strip()) == 1, "one column reaches the top"
    flat = body(draw({"loss": [(x, 1.0) for x, _ in points]}, width=80, height=8), 8)
    assert len([row for row in flat if row.strip()]) == 1, "the control: without it nothing does"


def test_are_single_points_joined() -> None:
    area = body(draw({"loss": [(0, 0), (100, 10)]}, width=50, height=5), 5)
    assert all(row.strip() for row in area)


def test_are_further_series_marked_and_named() -> None:
    series = {"loss": [(x, float(x)) for x in range(10)], "validation_loss": [(5, 0.0)]}
    lines = draw(series, width=60, height=6)
    assert lines[0].strip() == "line loss   o validation_loss"
    assert "o" in lines[6]


def test_do_plain_terminals_get_plain_characters() -> None:
    series = {"loss": [(x, float(x)) for x in range(10)], "validation_loss": [(5, 0.0)]}
    lines = draw(series, width=60, braille=False, events=[(3, "r")])
    assert "".join(lines).isascii()
    assert "." in "".join(body(lines, 16))
    assert "r" in lines[-2]


def test_is_what_is_no_number_left_out() -> None:
    assert draw({}, width=60) == []
    assert draw({"loss": [(1, math.nan), (2, math.inf)]}, width=60) == []
    lines = draw({"loss": [(1, math.nan), (2, 5.0), (3, -math.inf)]}, width=60)
    assert "5" in lines[1]


def test_does_a_narrow_terminal_still_get_a_plot() -> None:
    assert draw({"loss": [(0, 1.0), (1, 2.0)]}, width=5) != []
