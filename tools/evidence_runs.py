"""One run of `train` as the evidence watches it: started, killed where asked, stopped, read.

Owns the process of a run, its time limit, and what is kept of its step log and of its store's log.
Knows nothing of which runs there are. Invariants: a process that was started is ended before a
function returns; what a run committed before it was stopped is recorded all the same.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shardb
from tools.evidence_recipes import Arm, words_of
from tools.exactness_runs import COMPARED, committed_shards
from tools.exactness_trace import digests_of

POLL_SECONDS = 0.05
# What a process gets to commit its step and end by itself.
GRACE_SECONDS = 10.0
# A run is not begun with less.
LEAST_SECONDS = 5.0
# What `train` says of a batch whose attempts were all refused.
GIVEN_UP = "passed the guard"
KEPT = (
    *("step", "loss", "learning_rate", "grad_norm", "clip_scale", "tokens_seen", "loss_scale"),
    *("validation_loss", "seconds", "commit_seconds", "tokens_per_second", "batch_digest"),
    *("updated_shards", "max_active_param_shards", "max_active_optimizer_shards"),
    *("skipped_steps", "device_peak_bytes", "host_memory_bytes", "guarded_step_replay"),
    *("global_optimizer", "skipped"),
)


class Recorder:
    """One JSON object a line, appended whole: several processes may write to one file."""

    def __init__(self, path: Path, part: str) -> None:
        self._path = path
        self._part = part

    def write(self, kind: str, **values: Any) -> None:
        """Append a record."""
        line = json.dumps({"part": self._part, "kind": kind, **values}) + "\n"
        with open(self._path, "ab", buffering=0) as file:
            file.write(line.encode())


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where runs read and write, what they record into, and when they have to be over."""

    data: Path
    disk: Path
    memory: Path
    record: Recorder
    ends_at: float

    def seconds_left(self) -> float:
        """Give the seconds until everything has to be over."""
        return self.ends_at - time.monotonic()

    def store(self, name: str) -> Path:
        """Give the folder of a run's durable store."""
        return self.disk / name

    def active(self, name: str) -> Path:
        """Give the folder of a run's active store."""
        return self.memory / name

    def remove(self, name: str) -> None:
        """Remove what a run left."""
        for folder in (self.store(name), self.active(name)):
            shutil.rmtree(folder, ignore_errors=True)


def command_of(arm: Arm, place: Place, more: Sequence[str] = ()) -> list[str]:
    """Give the command line that begins a run."""
    return [
        *(sys.executable, "-m", "trainer.cli", "--store", str(place.store(arm.name))),
        *("--active", str(place.active(arm.name))),
        *("--data-dir", str(place.data / "train"), "--val-data-dir", str(place.data / "val")),
        *("--max-steps", str(arm.steps)),
        *words_of(arm.flags),
        *more,
    ]


def again_of(arm: Arm, place: Place, more: Sequence[str] = ()) -> list[str]:
    """Give the command line that goes on with it: the recipe is in the store."""
    return [sys.executable, "-m", "trainer.cli", "--store", str(place.store(arm.name)), *more]


def train(arm: Arm, place: Place, *, limit_seconds: float, records: bool = True) -> int:
    """Make a run, record it, leave its stores; give the exit code."""
    began = time.monotonic()
    code = run(command_of(arm, place), arm, place, limit_seconds=limit_seconds)
    if records:
        record_run(arm, place, code, time.monotonic() - began)
    return code


def arms_at_once(
    pairs: Sequence[tuple[Arm, Place]], limit: float, count: int
) -> dict[str, list[dict[str, Any]]]:
    """Make runs, some at a time, and remove their stores; give the steps of each by its name."""
    ends_at = time.monotonic() + limit

    def made(arm: Arm, place: Place) -> list[dict[str, Any]]:
        left = min(ends_at - time.monotonic(), place.seconds_left())
        if left < LEAST_SECONDS:
            place.record.write("skipped", run=arm.name, why="no time was left")
            return []
        train(arm, place, limit_seconds=left)
        lines = step_lines(place.store(arm.name))
        place.remove(arm.name)
        return lines

    with ThreadPoolExecutor(count) as pool:
        begun = {arm.name: pool.submit(made, arm, place) for arm, place in pairs}
        return {name: done.result() for name, done in begun.items()}


def record_run(arm: Arm, place: Place, code: int, seconds: float) -> None:
    """Record what a run committed: its flags, its steps, and how it ended."""
    lines = step_lines(place.store(arm.name))
    place.record.write("recipe", run=arm.name, flags=dict(arm.flags), steps=arm.steps)
    for line in lines:
        place.record.write("step", run=arm.name, **{k: line[k] for k in KEPT if k in line})
    last = lines[-1]["step"] if lines else 0
    said = "" if code == 0 else _last_words(place, arm)
    # Batches that a guard gave up are in the log of the next step alone, which may never come.
    given_up = output_of(place, arm.name).count(GIVEN_UP)
    place.record.write(
        "ended", run=arm.name, exit_code=code, step=last, seconds=round(seconds, 1), said=said,
        batches_given_up=given_up,
    )  # fmt: skip


def record_commits(arm: Arm, place: Place) -> None:
    """Record one digest of all weights and moments for each step in the log of the active store."""
    if not step_lines(place.store(arm.name)):
        return
    digests = {}
    for step, shards in committed_shards(place.active(arm.name)):
        trained = {name: shards[name] for name in sorted(shards) if name.startswith(COMPARED)}
        whole = hashlib.sha256(json.dumps(trained).encode())
        digests[step] = whole.hexdigest()[:16]
    steps = sorted(digests)
    for first in range(0, len(steps), 500):
        part = {step: digests[step] for step in steps[first : first + 500]}
        place.record.write("commits", run=arm.name, digests=part)


def record_tensors(arm: Arm, place: Place) -> None:
    """Record the digest of every parameter and moment of the run's newest commit."""
    if not step_lines(place.store(arm.name)):
        return
    with shardb.open(place.active(arm.name)) as store:
        head = store.resolve()
        digests = {
            f"{name}:{tensor}": digest
            for name, entry in head.shards.items()
            if name.startswith(COMPARED)
            for tensor, digest in digests_of(store.read_object(name, entry).arrays()).items()
        }
    place.record.write("tensors", run=arm.name, step=head.step, digests=digests)


def run(
    command: Sequence[str], arm: Arm, place: Place, *, limit_seconds: float, kill_step: int = 0
) -> int:
    """Run a command to its end, its limit, or SIGKILL inside the step after `kill_step`."""
    ends_at = min(time.monotonic() + limit_seconds, place.ends_at)
    with _process(command, place.disk / f"{arm.name}.txt") as process:
        while process.poll() is None and time.monotonic() < ends_at:
            line = _last_line(place.store(arm.name)) if kill_step else None
            if line is not None and line["step"] >= kill_step:
                time.sleep(random.uniform(0.0, line["seconds"]))
                process.send_signal(signal.SIGKILL)
                return process.wait()
            time.sleep(POLL_SECONDS)
        code = process.poll()
        return code if code is not None else _stopped(process)


def run_tool(words: Sequence[str], place: Place, name: str, limit_seconds: float) -> int:
    """Run a module of this project; its output goes to a file of its own."""
    ends_at = min(time.monotonic() + limit_seconds, place.ends_at)
    with _process([sys.executable, "-m", *words], place.disk / f"{name}.txt") as process:
        try:
            return process.wait(max(0.1, ends_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            return _stopped(process)


def copy_lines(found: Path, place: Place, kind: str, **values: object) -> None:
    """Record the lines that a tool wrote, then how it ended."""
    for text in found.read_text().splitlines() if found.exists() else []:
        line = json.loads(text)
        more = {"package": values["package"]} if "package" in values else {}
        place.record.write(line.pop("kind", "step"), **line, **more)
    place.record.write(kind, **values)


def step_lines(store: Path) -> list[dict[str, Any]]:
    """Read a run's step log; a last line that is not whole is left out."""
    path = store / "logs" / "steps.jsonl"
    if not path.exists():
        return []
    data = path.read_bytes()
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


def output_of(place: Place, name: str) -> str:
    """Read what a process said."""
    path = place.disk / f"{name}.txt"
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


@contextmanager
def _process(command: Sequence[str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    with output.open("ab") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _stopped(process: subprocess.Popen[bytes]) -> int:
    """End a process that ran too long: it may commit the step in work."""
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _last_line(store: Path) -> Mapping[str, Any] | None:
    """Read the newest whole line of a step log without reading all of it."""
    path = store / "logs" / "steps.jsonl"
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 16)))
        whole = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
    try:
        line = json.loads(whole)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def _last_words(place: Place, arm: Arm) -> str:
    return output_of(place, arm.name)[-600:]
