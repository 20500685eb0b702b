"""The plots of the evidence: SVG drawn from thinned records, by hand and to the pixel the same.

    python -m tools.evidence_plots docs/evidence/records.jsonl docs/evidence

Owns the drawing. Knows nothing of what the curves mean beyond their names. A plot whose records are
not there is not drawn.
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from tools.evidence_report import SOURCE_V25

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 60, 190, 34, 44
COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#7d4e9e", "#b8860b", "#333333", "#2aa198", "#a83279")
# The source's best held-out loss of its 100 M run, on a text and tokenizer of its own.
SOURCE_LOSS = (3000, 3.5135)
HEAD = (
    f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"'
    f' viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">'
)
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A named line; `is_dashed` for what is a reference, `is_marked` for single measurements."""

    name: str
    points: Points
    is_dashed: bool = False
    is_marked: bool = False


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A file's name, its title and axes, and what is drawn."""

    name: str
    title: str
    x: str
    y: str
    curves: Sequence[Curve]


def drawn(plot: Plot) -> str:
    """Give the SVG of a plot."""
    xs = [x for curve in plot.curves for x, _ in curve.points]
    ys = [y for curve in plot.curves for _, y in curve.points]
    to_x, x_ticks = _axis(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    to_y, y_ticks = _axis(min(ys), max(ys), HEIGHT - BOTTOM, TOP)
    parts = [
        HEAD,
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 20, plot.title, "start", size=14),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, plot.x, "middle"),
        _text(8, 20, plot.y, "start"),
    ]
    for tick in x_ticks:
        parts.append(_line(to_x(tick), TOP, to_x(tick), HEIGHT - BOTTOM))
        parts.append(_text(to_x(tick), HEIGHT - BOTTOM + 16, f"{tick:,.10g}", "middle"))
    for tick in y_ticks:
        parts.append(_line(LEFT, to_y(tick), WIDTH - RIGHT, to_y(tick)))
        parts.append(_text(LEFT - 6, to_y(tick) + 4, f"{tick:.10g}", "end"))
    for number, curve in enumerate(plot.curves):
        parts += _curve(curve, COLOURS[number % len(COLOURS)], number, to_x, to_y)
    return "\n".join([*parts, "</svg>", ""])


def _curve(
    curve: Curve,
    colour: str,
    number: int,
    to_x: Callable[[float], float],
    to_y: Callable[[float], float],
) -> list[str]:
    path = " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in curve.points)
    dashes = ' stroke-dasharray="5 4"' if curve.is_dashed else ""
    y = TOP + 14 + 18 * number
    x = WIDTH - RIGHT + 12
    place = f'x1="{x}" y1="{y - 4}" x2="{x + 18}" y2="{y - 4}"'
    parts = [
        f'<line {place} stroke="{colour}" stroke-width="2"{dashes}/>',
        _text(x + 24, y, curve.name, "start"),
    ]
    if len(curve.points) > 1:
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dashes}/>'
        )
    if curve.is_marked:
        parts += [
            f'<circle cx="{to_x(x):.1f}" cy="{to_y(y):.1f}" r="3" fill="{colour}"/>'
            for x, y in curve.points
        ]
    return parts


def _axis(
    low: float, high: float, first: float, last: float
) -> tuple[Callable[[float], float], list[float]]:
    """Give the way from values to pixels, and round values to mark."""
    span = (high - low) or 1.0
    step = 10.0 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (factor * step) <= 7)
    low, high = step * math.floor(low / step), step * math.ceil(high / step)
    high = high if high > low else low + step
    count = round((high - low) / step)

    def place(value: float) -> float:
        return first + (last - first) * (value - low) / (high - low)

    return place, [round(low + step * index, 10) for index in range(count + 1)]


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#e3e3e3"/>'


def _text(x: float, y: float, text: str, anchor: str, size: int = 12) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}">{escape(text)}</text>'


def smoothed(points: Points, width: int = 5) -> Points:
    """Give the mean of each point and its neighbours."""
    found = []
    for index, (x, _) in enumerate(points):
        near = points[max(0, index - width) : index + width + 1]
        found.append((x, sum(y for _, y in near) / len(near)))
    return found


def plots(lines: Sequence[Mapping[str, Any]]) -> list[Plot]:
    """Give every plot that there are records for."""
    runs: dict[str, dict[str, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if line["kind"] == "step" and "run" in line:
            runs[line["part"]][line["run"]].append(line)
    found = []
    if main := runs["main"].get("main"):
        found.append(_learning(main))
    for part, title in (
        ("rates", "The search of the peak rate: training loss, smoothed"),
        ("ablations", "Equal tokens, 56 M parameters: training loss, smoothed"),
        ("brisk", "Five times the rate, 56 M parameters: training loss, smoothed"),
        ("hot", "Twenty times the rate, 56 M parameters: training loss, smoothed"),
    ):
        curves = [
            Curve(name=run, points=smoothed(_of(steps, "loss")))
            for run, steps in runs[part].items()
        ]
        if curves:
            found.append(Plot(name=part, title=title, x="step", y="nats", curves=curves))
    if decays := _decays(lines, runs["search"]):
        found.append(decays)
    if long := runs["long"].get("long"):
        found.append(_long(long, runs["main"].get("main", [])))
    if v25 := runs["v25"]:
        found.append(_source_run(v25))
    return found


def _learning(steps: Sequence[Mapping[str, Any]]) -> Plot:
    curves = [
        Curve(name="training, smoothed", points=smoothed(_of(steps, "loss"))),
        Curve(name="held-out stories", points=_of(steps, "validation_loss"), is_marked=True),
        Curve(name="the source, its text", points=[SOURCE_LOSS], is_marked=True),
    ]
    title = "100 M parameters through the store"
    return Plot(name="learning", title=title, x="step", y="nats", curves=curves)


def _decays(
    lines: Sequence[Mapping[str, Any]], runs: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Plot | None:
    """Draw the runs of the search that differ in weight decay alone from what it chose at last."""
    of_search = [line for line in lines if line["part"] == "search"]
    chosen = [line["recipe"] for line in of_search if line["kind"] == "chosen"]
    curves = []
    for line in of_search if chosen else []:
        if line["kind"] != "tried":
            continue
        unlike = [k for k, v in line["recipe"].items() if v != chosen[-1][k]]
        points = _of(runs.get(line["run"], []), "validation_loss")
        # The first quarter is steep and says nothing.
        points = points[len(points) // 4 :]
        if unlike in ([], ["weight_decay"]) and points:
            name = f"weight decay {line['recipe']['weight_decay']:g}"
            curves.append(Curve(name=name, points=points, is_marked=True))
    if not curves:
        return None
    title = "The search: 11 M parameters on a tenth of the rows, held-out loss"
    return Plot(name="search", title=title, x="step", y="nats", curves=curves)


def _long(steps: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> Plot:
    curves = [
        Curve(name="training, smoothed", points=smoothed(_of(steps, "loss"))),
        Curve(name="held out, choosing half", points=_of(steps, "validation_loss")),
    ]
    if before:
        points = _of(before, "validation_loss")
        curves.append(Curve(name="the 3,000 steps, held out", points=points, is_dashed=True))
    title = "100 M parameters by the recipe that was searched"
    return Plot(name="long", title=title, x="step", y="nats", curves=curves)


def _source_run(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Plot:
    curves = [Curve(name=run, points=_of(steps, "loss")) for run, steps in runs.items()]
    printed = [(float(step), loss) for step, loss, _, _ in SOURCE_V25]
    curves.append(Curve(name="the source, its text", points=printed, is_marked=True))
    title = "291 M parameters by the source's recipe: training loss"
    return Plot(name="v25", title=title, x="step", y="nats", curves=curves)


def _of(steps: Sequence[Mapping[str, Any]], field: str) -> Points:
    return [(line["step"], line[field]) for line in steps if field in line]


def main(words: Sequence[str]) -> int:
    """Draw; 2 for other words."""
    if len(words) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    lines = [json.loads(line) for line in Path(words[0]).read_text().splitlines()]
    folder = Path(words[1])
    folder.mkdir(parents=True, exist_ok=True)
    for plot in plots(lines):
        path = folder / f"{plot.name}.svg"
        path.write_text(drawn(plot))
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
