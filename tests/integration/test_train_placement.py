"""Spilling a step's activations: same bits, and nothing left of it however the process ends."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from shardb.errors import StorageFullError
from shardb.filesystem import RealFileSystem
from shardb.fsck import check_store
from tests.support.training import (
    TrainProcess,
    arguments,
    make_data,
    step_lines,
    step_records,
    train_here,
)
from trainer.placement_spill import SpillFile

SPILL = ("--activation-placement", "spill")
MORE = ("--gradient-accumulation-steps", "2", "--max-steps", "6")


def test_spilled_and_killed_equals_in_memory_and_never_killed(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train_here(arguments(whole, data, *MORE)) == 0
    with TrainProcess(arguments(killed, data, *MORE, *SPILL)) as training:
        training.wait_for_step(3)
        training.send(signal.SIGKILL)
        training.finish()
    names = os.listdir(killed / "spare")
    assert not [name for name in names if name.startswith("held.")]
    findings = check_store(RealFileSystem(), str(killed)).findings
    assert [found for found in findings if found.severity != "info"] == []
    assert train_here(arguments(killed)) == 0
    assert step_records(killed) == step_records(whole)
    assert step_lines(killed)[-1]["step"] == 6


def test_a_disk_that_fills_up_stops_the_run_with_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, store = make_data(tmp_path / "data"), tmp_path / "run"
    assert train_here(arguments(store, data, *SPILL, "--max-steps", "2")) == 0
    with monkeypatch.context() as patched:
        patched.setattr(SpillFile, "_allocate", _full)
        code = train_here(arguments(store, None, "--max-steps", "4"))
    assert code == StorageFullError.exit_code
    assert "--activation-placement host" in capsys.readouterr().err
    assert max(step_records(store)) == 2
    assert train_here(arguments(store, None, "--max-steps", "4")) == 0
    assert max(step_records(store)) == 4


def _full(file: SpillFile, size: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
