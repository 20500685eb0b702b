"""What a report of a run shows: one row a step, from the store's log and the step log beside it.

Owns the reading and the shape of the data. The store's log tells losses, rates, norms, snapshots
and changes; the step log adds what only its lines have: seconds by part, memory, and steps that
are committed in an active store and not published yet. It opens no store and takes no lease, so it
works beside a live run. Knows nothing of drawing.

A long run is thinned to every n-th step, and the report says so; a step that was validated, that
skipped batches before it or to which something happened always stays.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardb.errors import NotFoundError
from shardb.filesystem import FileSystem, RealFileSystem
from shardb.history import LogEntry, quiet_log, read_log, read_newest
from shardb.log import Log
from shardb.timeline import Row, read_timeline
from trainer.step_log import FILE_NAME, log_folder

POINTS_MAX = 2000
SERIES = (
    "loss", "validation_loss", "learning_rate", "grad_norm", "clip_scale", "tokens_per_second",
    "ceiling_percent", "loss_scale", "seconds", "commit_seconds", "publish_seconds",
    "host_memory_bytes", "device_peak_bytes", "bytes_written",
)  # fmt: skip
WHOLE_STEP = ("seconds", "tokens_per_second")
Line = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A step as the report knows it."""

    step: int
    time: float
    metrics: Mapping[str, Any]
    norms: Mapping[str, float]
    timings: Mapping[str, float]
    events: list[tuple[str, str]]

    @property
    def is_marked(self) -> bool:
        """Say whether it may not be left out."""
        return bool(self.events or self.metrics.get("skipped") or "validation_loss" in self.metrics)


def report_data(store: Path, branch: str) -> dict[str, Any]:
    """Read everything; NotFoundError where there is no store, branch or trained step."""
    files, root = RealFileSystem(), str(store)
    timeline = read_timeline(files, root)
    rows = _lineage(timeline.rows, branch)
    lines = _lines(log_folder(store, branch) / FILE_NAME)
    steps = _steps(rows, _statistics(files, root, {row.commit for row in rows}), lines)
    if not steps:
        raise NotFoundError(
            f"{store}: no step was trained on branch {branch} yet: train --store {store} begins"
            " one; --branch names another"
        )
    shown = _thinned(steps)
    return {
        "store": store.absolute().name,
        "branch": branch,
        "step_count": len(steps),
        "shown_every": max(1, round(len(steps) / max(1, len(shown)))),
        "left_behind": sum(row.is_left for row in timeline.rows),
        "faults": timeline.faults,
        "step": [each.step for each in shown],
        "time": [each.time for each in shown],
        "tokens_seen": [each.metrics.get("tokens_seen") for each in shown],
        "series": {name: [each.metrics.get(name) for each in shown] for name in SERIES},
        "norms": _by_name([each.norms for each in shown]),
        "timings": _by_name([each.timings for each in shown]),
        "events": [
            {"step": each.step, "kind": kind, "text": text}
            for each in steps
            for kind, text in each.events
        ],
        "skips": [
            {"step": each.step, **skip}
            for each in steps
            for skip in each.metrics.get("skipped") or ()
        ],
    }


def _lineage(rows: Iterable[Row], branch: str) -> list[Row]:
    """Give the rows that the branch's newest one comes from, oldest first."""
    by_id = {row.commit: row for row in rows}
    heads = [row for row in by_id.values() if row.branch == branch and not row.is_left]
    at: Row | None = max(heads, key=lambda row: row.step, default=None)
    found: list[Row] = []
    while at is not None:
        found.append(at)
        at = by_id.pop(at.before, None) if at.before is not None else None
    return found[::-1]


def _statistics(files: FileSystem, root: str, wanted: set[str]) -> dict[str, dict[str, float]]:
    """Read each shard's gradient norm by commit, past whatever is damaged."""
    log = Log(files, f"{root}/wal")
    with quiet_log(files, root):
        sequences, last = read_newest(log)
    found: dict[str, dict[str, float]] = {}
    for item in read_log(log, sequences, last=last):
        if isinstance(item, LogEntry) and item.record["kind"] == "commit":
            told = item.record.get("statistics") or {}
            if item.record["id"] in wanted:
                found[item.record["id"]] = {
                    name.removeprefix("params/"): values["grad_norm"]
                    for name, values in told.items()
                    if "grad_norm" in values
                }
    return found


def _lines(path: Path) -> dict[int, Line]:
    """Read the step log; a line that is torn or none is left out."""
    found: dict[int, Line] = {}
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return found
    for line in text.splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict) and isinstance(values.get("step"), int):
            found[values["step"]] = values
    return found


def _steps(
    rows: list[Row], statistics: Mapping[str, Mapping[str, float]], lines: Mapping[int, Line]
) -> list[_Step]:
    steps = [
        _Step(
            step=row.step,
            time=row.time,
            metrics=_merged(_same(lines.get(row.step), row.metrics), row.metrics),
            norms=statistics.get(row.commit) or row.metrics.get("shard_norms") or {},
            timings=_same(lines.get(row.step), row.metrics).get("timings") or {},
            events=row.events,
        )
        for row in rows
        if row.step > 0
    ]
    newest, time = (steps[-1].step, steps[-1].time) if steps else (0, 0.0)
    for step in sorted(step for step in lines if step > newest and rows):
        line = lines[step]
        time += line.get("seconds") or 0.0  # the line does not say when; later than the one before
        timings = line.get("timings") or {}
        steps.append(
            _Step(step=step, time=time, metrics=line, norms={}, timings=timings, events=[])
        )
    return steps


def _merged(line: Line, metrics: Mapping[str, Any]) -> Line:
    """Give what a commit tells, and what only its line can: a commit is made before it has taken
    its time, so its own `seconds` lack it, and its tokens a second are too many."""
    return {**line, **metrics, **{name: line[name] for name in WHOLE_STEP if name in line}}


def _same(line: Line | None, metrics: Mapping[str, Any]) -> Line:
    """Give the line of a step, unless it tells of another one of the same number."""
    if line is None or line.get("batch_digest") != metrics.get("batch_digest"):
        return {}
    return line


def _thinned(steps: list[_Step]) -> list[_Step]:
    every = -(-len(steps) // POINTS_MAX)
    last = len(steps) - 1
    return [s for i, s in enumerate(steps) if i % every == 0 or i == last or s.is_marked]


def _by_name(rows: list[Mapping[str, float]]) -> dict[str, list[float | None]]:
    """Turn one mapping a step into one column a name, in the order of first appearance."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}
