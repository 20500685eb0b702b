"""Runs in an active store that die at a chosen step, and looks at what they left."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import shardb
from shardb.cli import run as shardb_command
from tests.support.training import train_here
from trainer.active import TwoTiers
from trainer.run import Run


class Killed(Exception):
    """Stands for the death of the process."""


def _stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Let the process "die" after a step: what is committed stays, nothing more is published."""
    true_step = Run.step

    def dying(run: Run) -> dict[str, object]:
        line = true_step(run)
        if run.head.step >= step:
            monkeypatch.setattr(TwoTiers, "finish", lambda *_: None)
            raise Killed
        return line

    monkeypatch.setattr(Run, "step", dying)


def train_until_killed(args: Sequence[str], *, after: int) -> None:
    """Run `train` in this process until it "dies" after a step."""
    with pytest.MonkeyPatch.context() as patch:
        _stop_after(patch, after)
        with pytest.raises(Killed):
            train_here(args)


def head(store: Path, branch: str = "main") -> shardb.Commit:
    with shardb.open(store) as opened:
        return opened.branches()[branch]


def log_rows(store: Path) -> list[dict[str, Any]]:
    """Give what `shardb log --json` tells, in its order."""
    out = io.StringIO()
    with redirect_stdout(out):
        assert shardb_command(["log", str(store), "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(out.getvalue())
    return rows


def logged_steps(store: Path) -> list[int]:
    """Give the steps that `shardb log` tells, in its order."""
    return [row["step"] for row in log_rows(store)]


def pinned_steps(store: Path) -> dict[str, int]:
    """Give the snapshots of a store, each with its step."""
    with shardb.open(store) as opened:
        return {name: commit.step for name, commit in opened.snapshots().items()}


def published_steps(store: Path) -> list[int]:
    """Give the steps that the log of a store has a record of its own for."""
    with shardb.open(store) as opened:
        return [record["step"] for record in opened.history() if record["kind"] == "commit"]
