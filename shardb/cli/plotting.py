"""Curves on a terminal.

Owns drawing series of points as text: the first one as a line of braille dots, the others as marks
over it, events as letters below. Knows nothing of stores. Where many points fall into one column,
the line covers all of them: a spike is seen however long the run is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Points = Sequence[tuple[float, float]]
MARKS = "ox+*"
DOTS_ACROSS, DOTS_DOWN = 2, 4
BRAILLE = 0x2800
# The bit of each dot of a braille character, by column and row.
DOT_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
WIDTH_MIN = 20


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The drawing area, in characters, and the ranges that it shows."""

    width: int
    height: int
    left: float
    right: float
    low: float
    high: float

    def column(self, x: float, per_character: int = 1) -> int:
        """The column of an x, counted in parts of a character."""
        return _scaled(x, self.left, self.right, self.width * per_character)

    def row(self, y: float, per_character: int = 1) -> int:
        """The row of a y, from the top."""
        rows = self.height * per_character
        return rows - 1 - _scaled(y, self.low, self.high, rows)


def _scaled(value: float, low: float, high: float, cells: int) -> int:
    if high <= low:
        return 0
    return min(cells - 1, max(0, int((value - low) / (high - low) * (cells - 1) + 0.5)))


def draw(
    series: Mapping[str, Points],
    *,
    width: int,
    height: int = 16,
    events: Sequence[tuple[float, str]] = (),
    braille: bool = True,
) -> list[str]:
    """Lines of a plot; none when no point has a finite value.

    `width` is that of the terminal. `events` are places on the x axis with a letter each.
    """
    finite = {
        name: [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
        for name, points in series.items()
    }
    finite = {name: points for name, points in finite.items() if points}
    if not finite:
        return []
    every = [point for points in finite.values() for point in points]
    low, high = min(y for _, y in every), max(y for _, y in every)
    labels = [f"{high:.4g}", f"{(low + high) / 2:.4g}", f"{low:.4g}"]
    margin = max(map(len, labels)) + 2
    frame = Frame(
        width=max(WIDTH_MIN, width - margin),
        height=height,
        left=min(x for x, _ in every),
        right=max(x for x, _ in every),
        low=low,
        high=high,
    )
    rows = _drawn(frame, finite, braille=braille)
    shown = {0: labels[0], height // 2: labels[1], height - 1: labels[2]}
    lines = [f"  {_legend(finite, braille=braille)}"]
    lines += [f"{shown.get(at, ''):>{margin - 2}} |{''.join(row)}" for at, row in enumerate(rows)]
    lines.append(f"{'':>{margin - 2}} +{'-' * frame.width}")
    if events:
        lines.append(f"{'':>{margin}}{_event_line(frame, events)}")
    first, last = f"{frame.left:.10g}", f"{frame.right:.10g}"
    lines.append(f"{'':>{margin}}{first}{last:>{frame.width - len(first)}}")
    return [line.rstrip() for line in lines]


def _drawn(frame: Frame, series: Mapping[str, Points], *, braille: bool) -> list[list[str]]:
    names = list(series)
    if braille:
        cells = _braille_line(frame, series[names[0]])
        marked = dict(zip(names[1:], MARKS, strict=False))
    else:
        cells = [[" "] * frame.width for _ in range(frame.height)]
        marked = dict(zip(names, "." + MARKS, strict=False))
    for name, mark in marked.items():
        for x, y in series[name]:
            cells[frame.row(y)][frame.column(x)] = mark
    return cells


def _braille_line(frame: Frame, points: Points) -> list[list[str]]:
    """One line through the points, which may be more than there are columns."""
    spans: dict[int, tuple[int, int]] = {}
    for x, y in points:
        column, row = frame.column(x, DOTS_ACROSS), frame.row(y, DOTS_DOWN)
        top, bottom = spans.get(column, (row, row))
        spans[column] = (min(top, row), max(bottom, row))
    bits = [[0] * frame.width for _ in range(frame.height)]

    def dot(column: int, row: int) -> None:
        across, down = column % DOTS_ACROSS, row % DOTS_DOWN
        bits[row // DOTS_DOWN][column // DOTS_ACROSS] |= DOT_BITS[across][down]

    before: tuple[int, float] | None = None
    for column in sorted(spans):
        top, bottom = spans[column]
        for row in range(top, bottom + 1):
            dot(column, row)
        middle = (top + bottom) / 2
        if before is not None:
            for between in range(before[0] + 1, column):
                part = (between - before[0]) / (column - before[0])
                dot(between, round(before[1] + part * (middle - before[1])))
        before = (column, middle)
    return [[chr(BRAILLE + mask) if mask else " " for mask in row] for row in bits]


def _event_line(frame: Frame, events: Sequence[tuple[float, str]]) -> str:
    cells = [" "] * frame.width
    for x, letter in events:
        cells[frame.column(x)] = letter  # one beyond the curve stands at its end
    return "".join(cells)


def _legend(series: Mapping[str, Points], *, braille: bool) -> str:
    marks = ["line", *MARKS] if braille else [".", *MARKS]
    return "   ".join(f"{mark} {name}" for name, mark in zip(series, marks, strict=False))
