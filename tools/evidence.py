"""The evidence that a model learns through the store: every run of it, with its controls.

Parts run in lanes, one process a lane, each on the GPU that its lane names; a lane's parts follow
one another. Everything is appended to one file of JSON lines, so a stop at any time keeps what was
made until then.

    python -m tools.evidence --list
    python -m tools.evidence --parcel rows.tar --out out --limit-seconds 540 \\
        --lane 0:main,package --lane 1:resident,killed --lane 1:ablations
    python -m tools.evidence --data rows --out out --tiny --lane 0:main,package,killed

Exit codes: 0 everything was run, 1 a part failed or was left out, 2 usage.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from tools.bench.ram_room import memory_of_machine
from tools.evidence_parts import PARTS
from tools.evidence_recipes import Scale
from tools.evidence_rows import unpack
from tools.evidence_runs import Place, Recorder

FILE_NAME = "evidence.jsonl"
# A part is not begun with less.
LEAST_SECONDS = 15.0
# A run that is stopped commits its step, and then is recorded.
LANE_ENDS_BEFORE = 18.0


def main(words: Sequence[str] | None = None) -> int:
    """Start the lanes, wait for them."""
    given = arguments_of(words)
    if given.list:
        for part in PARTS.values():
            print(f"{part.name:<10} {part.seconds:>4} s  {part.shows}")
        return 0
    lanes = [lane.split(":", 1) for lane in given.lane]
    unknown = [p for _, parts in lanes for p in parts.split(",") if p not in PARTS]
    if unknown or not lanes:
        print(f"--lane GPU:PART,PART: {unknown or 'none given'}; see --list", file=sys.stderr)
        return 2
    ends_at = time.monotonic() + given.limit_seconds
    given.out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="evidence-", dir=given.work))
    memory = Path(tempfile.mkdtemp(prefix="evidence-", dir=given.memory))
    try:
        if given.is_lane:
            return _lane(given, lanes[0][1].split(","), work, memory, ends_at)
        data = given.data or _unpacked(given, memory / "data")
        return _lanes(given, lanes, data, ends_at)
    finally:
        for folder in (work, memory):
            shutil.rmtree(folder, ignore_errors=True)


def arguments_of(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--list", action="store_true", help="print the parts and run none")
    parser.add_argument("--lane", action="append", default=[], help="GPU:PART,PART")
    parser.add_argument("--parcel", type=Path, help="rows that were packed")
    parser.add_argument("--data", type=Path, help="rows that were unpacked already")
    parser.add_argument("--out", type=Path, default=Path("evidence-out"))
    parser.add_argument("--work", type=Path, default=Path("/tmp"), help="a disk")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a RAM disk")
    parser.add_argument("--limit-seconds", type=float, default=540)
    parser.add_argument("--tiny", action="store_true", help="try all of it on a processor")
    parser.add_argument("--is-lane", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def _unpacked(given: argparse.Namespace, data: Path) -> Path:
    record = Recorder(given.out / FILE_NAME, "data")
    began = time.monotonic()
    facts = unpack(given.parcel, data)
    record.write("rows", seconds=round(time.monotonic() - began, 1), **facts)
    return data


def _lanes(
    given: argparse.Namespace, lanes: Sequence[Sequence[str]], data: Path, ends_at: float
) -> int:
    """Run every lane in a process of its own; an interrupt ends them all."""
    record = Recorder(given.out / FILE_NAME, "machine")
    record.write("machine", **_machine(given))
    processes = []
    for number, (gpu, parts) in enumerate(lanes):
        command = [sys.executable, "-m", "tools.evidence", "--is-lane", "--lane", f"{gpu}:{parts}"]
        command += ["--data", str(data), "--out", str(given.out)]
        command += ["--work", str(given.work), "--memory", str(given.memory)]
        command += ["--limit-seconds", str(ends_at - time.monotonic() - LANE_ENDS_BEFORE)]
        command += ["--tiny"] if given.tiny else []
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
        with (given.out / f"lane-{number}.txt").open("wb") as file:
            processes.append(
                subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
            )
    codes = []
    for process in processes:
        try:
            codes.append(process.wait(max(1.0, ends_at - time.monotonic())))
        except subprocess.TimeoutExpired:
            process.kill()
            codes.append(process.wait())
    return 1 if any(codes) else 0


def _lane(
    given: argparse.Namespace, parts: Sequence[str], work: Path, memory: Path, ends_at: float
) -> int:
    """Run a lane's parts one after the other; one that fails does not stop the next."""
    scale = Scale.tiny() if given.tiny else Scale()
    failed = 0
    for name in parts:
        record = Recorder(given.out / FILE_NAME, name)
        place = Place(data=given.data, disk=work, memory=memory, record=record, ends_at=ends_at)
        left = place.seconds_left()
        if left < LEAST_SECONDS:
            record.write("skipped", why="no time was left")
            failed += 1
            continue
        began = time.monotonic()
        print(f"{name}: begins, {left:.0f} s are left", flush=True)
        try:
            PARTS[name].make(place, scale, min(left - 5, PARTS[name].seconds))
        except Exception:  # noqa: BLE001 - what was measured in other parts is worth more
            traceback.print_exc()
            record.write("failed", why=traceback.format_exc(limit=3))
            failed += 1
        seconds = round(time.monotonic() - began, 1)
        record.write("part", seconds=seconds)
        print(f"{name}: ended after {seconds} s", flush=True)
    return 1 if failed else 0


def _machine(given: argparse.Namespace) -> dict[str, object]:
    return {
        "devices": _devices(),
        "cores": os.cpu_count(),
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "ram_disk_free_bytes": shutil.disk_usage(given.memory).free,
        "disk_free_bytes": shutil.disk_usage(given.work).free,
        "memory_available_bytes": memory_of_machine()[1],
    }


def _devices() -> list[str]:
    """Name the GPUs, as their driver does."""
    if shutil.which("nvidia-smi") is None:
        return []
    words = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.splitlines()


if __name__ == "__main__":
    sys.exit(main())
