"""The verb `log`: every step that was ever committed, from the log itself."""

from __future__ import annotations

import json as json_text
import re
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Console

from shardb import refs
from shardb.cli.places import JsonOption, StoreArgument, store_path
from shardb.cli.plotting import draw
from shardb.cli.printing import in_bytes, in_local_time, number, plain, print_table, warn
from shardb.errors import NotFoundError, UsageError
from shardb.filesystem import RealFileSystem
from shardb.listing import listed
from shardb.timeline import Row, Span, metric_names, read_timeline

# Headings of the usual columns and the metrics that fill them.
COLUMNS = {
    "loss": ("loss", ".4f"),
    "validation": ("validation_loss", ".4f"),
    "rate": ("learning_rate", ".3g"),
    "tokens": ("tokens_seen", ".4f"),
}
PLOTTED = ("loss", "validation_loss")
AGO = re.compile(r"^(\d+(?:\.\d+)?)([smhdw])$")
UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
STEP = re.compile(r"^(?:step-)?(\d{1,18})$")
EVENTS = {
    "rewind": ("r", "rewound"),
    "branch": ("b", "branch"),
    "recipe": ("c", "recipe changed"),
    "snapshot": ("s", "snapshot"),
}


def log(
    store: StoreArgument = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, help="Only the last N commits.")
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", metavar="NAME", help="Show this metric; may be repeated."),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="STEP|TIME", help="From a step, a time, or 2h ago on."),
    ] = None,
    plot: Annotated[
        bool, typer.Option("--plot", help="Draw the loss, or each --metric, over the steps.")
    ] = False,
    json: JsonOption = False,
) -> int:
    """Tell every step that was committed, the newest last: loss, learning rate, tokens, bytes.

    The log is the store's audit trail: it also holds steps whose weights were given back long ago,
    and those that a published commit brought along. Snapshots, branches, changes of the recipe and
    rewinds are noted at the commit they belong to; steps that no branch comes from any more are
    marked as left behind.

    \b
    Examples:
      shardb log run
      shardb log run --limit 20
      shardb log run --since step-3000 --metric grad_norm --metric tokens_per_second
      shardb log run --since 2h                also 30m, 3d, 2026-11-29, "2026-11-29 14:00"
      shardb log run --plot
      shardb log run --json

    It only reads, and opens nothing: it works beside a live run, on a read-only disk and on a
    damaged store. Where a part of the log is damaged it says so on standard error, tells the rest,
    and exits 1; where this user may read nothing of it, 7. An interrupt leaves nothing behind.
    """
    if plot and json:
        raise UsageError("--plot draws for people and --json is for scripts; give one of them")
    root = store_path(store)
    timeline = read_timeline(RealFileSystem(), root, _span(limit, since))
    for fault in timeline.faults:
        warn(fault)
    rows, metrics = timeline.rows, _known(metric or [], timeline.rows)
    if json:
        _print_json(rows, metrics)
    elif not rows:
        none = "no commit of it can be read" if timeline.faults else "no commit yet"
        print(f"{root}: {'no commit there' if since else none}")
    elif plot:
        _print_plots(rows, metrics)
    else:
        _print_text(rows, metrics)
    return 1 if timeline.faults else 0


def _span(limit: int | None, since: str | None) -> Span:
    if since is None:
        return Span(count=limit)
    if match := STEP.match(since):
        return Span(count=limit, step=int(match.group(1)))
    if match := AGO.match(since):
        ago_seconds = float(match.group(1)) * UNIT_SECONDS[match.group(2)]
        return Span(count=limit, time=time.time() - ago_seconds)
    try:
        return Span(count=limit, time=datetime.fromisoformat(since).timestamp())
    except (ValueError, OverflowError, OSError) as error:
        raise UsageError(
            f"--since {since!r}: give a step (3000), how long ago (30m, 2h, 3d) or a time "
            "(2026-11-29, '2026-11-29 14:00')"
        ) from error


def _known(wanted: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """The metrics that are wanted; NotFoundError for one that no commit here has."""
    if wanted and rows:
        known = metric_names(rows)
        for name in wanted:
            if name not in known:
                raise NotFoundError(refs.no_such("metric", name, known))
    return list(wanted)


# For scripts


def _print_json(rows: Sequence[Row], metrics: Sequence[str]) -> None:
    """One document, one commit a line: `plain` and indentation would double the time."""
    lines = []
    for row in rows:
        told = row.to_json()
        if metrics:
            told["metrics"] = {name: row.metrics.get(name) for name in metrics}
        lines.append(_one_line(told))
    print("[" + ",\n ".join(lines) + "]", flush=True)


def _one_line(told: dict[str, Any]) -> str:
    try:
        return json_text.dumps(told, allow_nan=False)
    except (ValueError, TypeError):
        return json_text.dumps(plain(told), allow_nan=False)


# For people


def _print_text(rows: Sequence[Row], metrics: Sequence[str]) -> None:
    many = len({row.branch for row in rows}) > 1
    shown = {name: (name, ".6g") for name in metrics} or COLUMNS
    table = [
        (
            str(row.step),
            *[number(row.metrics.get(name), digits) for name, digits in shown.values()],
            in_bytes(row.bytes),
            in_local_time(row.time),
            "; ".join([f"branch {row.branch}"] * many + row.notes),
        )
        for row in rows
    ]
    print_table(("step", *shown, "bytes", "time", "notes"), table, left=0)


def _print_plots(rows: Sequence[Row], metrics: Sequence[str]) -> None:
    """The usual curves in one plot, or one plot for each metric that was asked for."""
    console = Console()
    there = {name for name in PLOTTED if any(name in row.metrics for row in rows)}
    wanted = [[name] for name in metrics] or [[name for name in PLOTTED if name in there]]
    kept = [row for row in rows if not row.is_left]
    events = [
        (float(row.step), EVENTS[kind][0])
        for row in rows
        for kind, _ in row.events
        if kind in EVENTS
    ]
    drawn = False
    for names in wanted:
        lines = draw(
            {name: _points(kept, name) for name in names},
            width=console.width,
            events=events,
            braille="utf" in (sys.stdout.encoding or "").lower(),
        )
        drawn = drawn or bool(lines)
        print("\n".join(lines) if lines else f"no number to draw of {', '.join(names) or 'loss'}")
    if drawn:
        _print_legend(rows, events)


def _points(rows: Sequence[Row], name: str) -> list[tuple[float, float]]:
    values = ((row.step, row.metrics.get(name)) for row in rows)
    return [
        (float(step), float(value))
        for step, value in values
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]


def _print_legend(rows: Sequence[Row], events: Sequence[tuple[float, str]]) -> None:
    letters = {letter for _, letter in events}
    told = [f"{letter} {text}" for letter, text in EVENTS.values() if letter in letters]
    left = sum(row.is_left for row in rows)
    if left:
        told.append(f"not drawn: {left} left behind")
    branches = dict.fromkeys(row.branch for row in rows if not row.is_left)
    if len(branches) > 1:
        told.append(f"the points of branches {listed(branches)} are in one curve")
    steps = [row.step for row in rows]
    print("; ".join([f"steps {min(steps)} to {max(steps)}", *told]))
