"""Does a run that has all its steps make up the line that a kill took, and leave others alone?"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

import shardb
from shardb.cli import run as shardb_command
from tests.support.training import arguments, make_data, step_lines, train_here
from trainer.step_log import FILE_NAME, StepLog, log_folder

STEPS = 3


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """Give a run that was killed between its last commit and that step's line."""
    store = tmp_path / "run"
    data = make_data(tmp_path / "data")
    assert train_here([*arguments(store, data), "--max-steps", str(STEPS)]) == 0
    log = log_folder(store, "main") / FILE_NAME
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-1]))
    return store


def steps_told(store: Path) -> list[int]:
    return [line["step"] for line in step_lines(store)]


def test_the_last_line_is_made_up(killed: Path) -> None:
    assert steps_told(killed) == list(range(1, STEPS))
    assert train_here(arguments(killed)) == 0
    assert steps_told(killed) == list(range(1, STEPS + 1))
    assert step_lines(killed)[-1]["rebuilt"] is True
    assert shardb_command(["fsck", str(killed)]) == 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_log_that_takes_no_line_leaves_a_finished_run_finished(
    number: int, killed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(number, "no line")

    monkeypatch.setattr(StepLog, "append", refused)
    assert train_here(arguments(killed)) == 0
    assert steps_told(killed) == list(range(1, STEPS))


def test_the_log_of_a_run_that_somebody_trains_is_left_alone(killed: Path) -> None:
    with shardb.open(killed) as store, store.begin("main"):
        assert train_here(arguments(killed)) == 0
    assert steps_told(killed) == list(range(1, STEPS))
