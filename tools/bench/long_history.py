"""How long opening and telling a long history takes: 100,000 commits by default, without objects.

The log is written as the store writes it, segment by segment, but without a sync a record, so that
making it takes a minute and not an hour. What is measured runs in processes of its own.

Usage: python -m tools.bench.long_history --dir DIR [--commits N] [--shards N] [--rounds 5] [--keep]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import shardb
from shardb import frames, records, state
from shardb.filesystem import RealFileSystem
from shardb.log import SEGMENT_LIMIT_BYTES, Log
from shardb.records import Record, new_id, new_record
from shardb.state import DictTables

BEGAN = 1_700_000_000.0
STEP_SECONDS = 2.5
OBJECT_BYTES = 12 << 20
REWIND_EVERY = 20_000


class HistoryWriter:
    """Appends records to a log that nobody reads meanwhile, and keeps the tables beside."""

    def __init__(self, root: Path) -> None:
        files = RealFileSystem()
        self._log = Log(files, str(root / "wal"))
        self.tables = DictTables()
        self._sequence = 1
        self._closed: list[list[object]] = []
        scan = self._log.scan(1)
        for frame in scan.frames:
            state.apply(self.tables, records.unpack(frame.payload))
        self._data = bytearray((root / "wal/0000000001.wal").read_bytes())
        self._lsn, self._digest = scan.frames[-1].lsn, scan.frames[-1].digest

    def append(self, record: Record) -> None:
        """Append one record; begin a new segment when this one is long enough."""
        state.apply(self.tables, record)
        state.sweep(self.tables, ())
        self._add(record)
        if len(self._data) >= SEGMENT_LIMIT_BYTES:
            self.flush()
            self._log.compress(self._sequence)
            self._closed.append(self._log.describe(self._sequence))
            self._log.drop_raw(self._sequence)
            full = state.full_state(self.tables)
            full["meta"]["closed"] = list(self._closed)
            self._sequence += 1
            self._data.clear()
            moment = record.get("time", BEGAN)
            self.append({**new_record("checkpoint", state=full), "time": moment})

    def _add(self, record: Record) -> None:
        self._lsn += 1
        frame, self._digest = frames.encode(
            lsn=self._lsn, previous=self._digest, payload=records.pack(record)
        )
        self._data += frame

    def flush(self) -> None:
        """Write the segment as far as it is."""
        Path(self._log.path(self._sequence)).write_bytes(self._data)


def commit_record(step: int, parent: str | None, shards: int) -> Record:
    """A commit as a trainer makes it, of objects that do not exist."""
    random = os.urandom(16 * shards)
    moment = BEGAN + step * STEP_SECONDS
    metrics: dict[str, object] = {
        "loss": 1.5 + 9 * math.exp(-step / 4000) + 0.1 * math.sin(step),
        "learning_rate": 3e-4 * math.cos(step / 100_000),
        "grad_norm": 1.0 + 0.5 * math.sin(step / 7),
        "tokens_seen": step * 16_384,
        "tokens_per_second": 6500.0,
    }
    if step % 500 == 0:
        metrics["validation_loss"] = 1.7 + 9 * math.exp(-step / 4000)
    return {
        "kind": "commit",
        "id": new_id(),
        "time": moment,
        "branch": "main",
        "step": step,
        "parent": parent,
        "shards": {
            f"{'params' if n % 2 else 'optim'}/block_{n // 2:03d}": [
                random[16 * n : 16 * n + 16],
                OBJECT_BYTES,
                step,
                True,
            ]
            for n in range(shards)
        },
        "state": {"position": step * 8, "tokens_seen": step * 16_384, "seed": 7},
        "metrics": metrics,
        "statistics": {},
        "recipe": None,
    }


def write_history(root: Path, commits: int, shards: int) -> None:
    """Make a store whose log tells so many commits, a rewind now and then, and snapshots."""
    shardb.open(root, create=True).close()
    writer = HistoryWriter(root)
    parent: str | None = None
    step = 0
    for number in range(1, commits + 1):
        record = commit_record(step, parent, shards)
        writer.append(record)
        parent, step = record["id"], step + 1
        if number % REWIND_EVERY == 0:
            older = writer.tables.get("branches", "main")["retained"][0]
            writer.append(new_record("snapshot", name=f"before-{number}", commit=older))
            writer.append(new_record("rewind", branch="main", to=older, origin=parent))
            parent, step = older, writer.tables.get("commits", older)["step"] + 1
    writer.flush()


def seconds_of(command: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds of a process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def python(code: str) -> list[str]:
    """A command that runs some lines."""
    return [sys.executable, "-c", code]


def verb(*arguments: object) -> list[str]:
    """A command that runs `shardb`."""
    return [*python("from shardb.cli import main; main()"), *map(str, arguments)]


def ways(root: Path) -> dict[str, list[str]]:
    """What is measured, by name."""
    opening = f"import shardb; shardb.open({str(root)!r}).close()"
    with shardb.open(root) as store:
        since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(store.resolve().time - 60))
    without_index = f"import shutil; shutil.rmtree({str(root / 'index')!r})"
    return {
        "interpreter and import": python("import shardb.cli"),
        "open": python(opening),
        "open, index lost": python(f"{without_index}; {opening}"),
        "log --limit 20": verb("log", root, "--limit", "20"),
        "log": verb("log", root),
        "log --json": verb("log", root, "--json"),
        "log --plot": verb("log", root, "--plot"),
        "log --since a minute": verb("log", root, "--since", since),
    }


def main() -> None:
    """Make the store, measure, print a table, and write the rows as JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", required=True, type=Path)
    parser.add_argument("--commits", type=int, default=100_000)
    parser.add_argument("--shards", type=int, default=35)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", action="store_true", help="leave the store there")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    root = options.dir / "long-history-bench"
    if not root.exists():
        write_history(root, options.commits, options.shards)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in ways(root)}
    for _ in range(options.rounds):
        for name, command in ways(root).items():
            wall, cpu = seconds_of(command)
            rows[name].append({"seconds": wall, "cpu": cpu})
    size = sum(path.stat().st_size for path in (root / "wal").iterdir())
    print(
        f"{options.commits} commits of {options.shards} shards, log {size / 1e6:.0f} MB on disk, "
        f"{platform.machine()}, {os.cpu_count()} cores"
    )
    for name, row in rows.items():
        walls = sorted(item["seconds"] for item in row)
        cpu = statistics.median(item["cpu"] for item in row)
        spread = f"{walls[0]:.2f}..{walls[-1]:.2f}"
        print(f"{name:24s} {statistics.median(walls):8.2f} s {spread:>14s} {cpu:8.2f} s CPU")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    if not options.keep:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
