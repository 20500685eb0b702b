"""Running `train` in tests: tiny data, a tiny model, processes that are killed, and what they left.

`train_here` runs the command inside the test; `TrainProcess` as a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import shardb
from tests.support.warm_process import WarmProcess
from trainer.cli import run
from trainer.signals import StopRequest

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = (
    *("--vocab-size", "64", "--hidden-size", "32", "--num-layers", "2", "--num-heads", "4"),
    *("--num-kv-heads", "2", "--intermediate-size", "48"),
)
SEQ_LEN = 16
WAIT_SECONDS = 120
_CEILINGS: dict[tuple[Any, str], Any] = {}


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one step must repeat bit for bit however often the run was killed."""

    batch_digest: str
    loss: float
    learning_rate: float
    shards: dict[str, str]


def make_data(folder: Path, *, rows: int = 200, vocab_size: int = 64, seed: int = 0) -> Path:
    """Write `folder`/train and `folder`/val: a walk over the ids, easy to learn."""
    random = np.random.default_rng(seed)
    for split, count in (("train", rows), ("val", 24)):
        (folder / split).mkdir(parents=True)
        steps = random.integers(0, 3, (count, SEQ_LEN + 1))
        ids = (random.integers(0, vocab_size, (count, 1)) + steps.cumsum(axis=1)) % vocab_size
        half = count // 2
        np.save(folder / split / "rows_000.npy", ids[:half].astype("<u2"))
        np.save(folder / split / "rows_001.npy", ids[half:].astype("<u2"))
    return folder


def arguments(store: Path, data: Path | None = None, *more: str) -> list[str]:
    """Give the flags of a tiny run; without `data` those of a plain resume."""
    if data is None:
        return ["--store", str(store), *more]
    return [
        *("--store", str(store), *MODEL, "--data-dir", str(data / "train")),
        *("--device", "cpu", "--threads", "1", "--seed", "7", "--micro-batch-size", "4"),
        *("--learning-rate", "0.003", *more),
    ]


def train_here(args: Sequence[str]) -> int:
    """Run `train` in this process; give the exit code."""
    with _measured_once():
        return run(list(args), StopRequest())


@contextmanager
def _measured_once() -> Iterator[None]:
    """Measure this machine once a session and dtype, and not at the start of every run."""
    from trainer import ceiling  # it loads torch, which tests of the store do not need

    measure = ceiling.measure

    def measured(dtype: Any, device: Any) -> Any:
        if (dtype, device.name) not in _CEILINGS:
            _CEILINGS[dtype, device.name] = measure(dtype, device)
        return _CEILINGS[dtype, device.name]

    with patch.object(ceiling, "measure", measured):
        yield


class TrainProcess:
    """`train` as a process; its standard output is read line by line.

    is_fresh: a new interpreter, as from a shell, instead of one that has imported the command.
    """

    def __init__(self, args: Sequence[str], *, is_fresh: bool = False) -> None:
        self.process = _fresh(args) if is_fresh else WarmProcess("trainer.cli", args)

    @property
    def pid(self) -> int:
        return self.process.pid

    def lines(self) -> Iterator[str]:
        """Yield the lines of standard output as they come."""
        assert self.process.stdout is not None
        yield from (line.rstrip("\n") for line in self.process.stdout)

    def wait_for_step(self, step: int) -> str:
        """Read until the line of `step`; a process that ends before fails the test."""
        for line in self.lines():
            if line.startswith(f"step={step} "):
                return line
        raise AssertionError(f"ended before step {step}: {self.finish()}")

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def finish(self) -> tuple[int, str, str]:
        """Wait for the end; give exit code, the rest of standard output, and standard error."""
        out, err = self.process.communicate(timeout=WAIT_SECONDS)
        return self.process.wait(), out, err

    def __enter__(self) -> TrainProcess:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def _fresh(args: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "trainer.cli", *args],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def step_records(store: Path) -> dict[int, StepRecord]:
    """Read every step that a run ever committed from its log, by step."""
    found = {}
    with shardb.open(store) as opened:
        for record in opened.history():
            if record["kind"] != "commit":
                continue
            metrics = record["metrics"]
            found[record["step"]] = StepRecord(
                batch_digest=metrics.get("batch_digest", ""),
                loss=metrics.get("loss", 0.0),
                learning_rate=metrics.get("learning_rate", 0.0),
                shards={name: bytes(row[0]).hex() for name, row in record["shards"].items()},
            )
    return found


def step_lines(store: Path) -> list[dict[str, Any]]:
    """Read the step log."""
    text = (store / "logs" / "steps.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def head_step(store: Path) -> int:
    """Give the step of the newest commit."""
    with shardb.open(store) as opened:
        return opened.resolve().step
