"""Does a run with a shuffle buffer go on in the middle of it as if it had never stopped?"""

from __future__ import annotations

from pathlib import Path

import pytest

import shardb
from tests.support.active_runs import train_until_killed
from tests.support.training import arguments, step_records, train_here
from trainer.run_shards import read_stored_run

# Steps of 4 rows: the buffer of 10 is emptied in the middle of one.
BUFFER = ("--row-order", "sequential", "--shuffle-buffer-size", "10")


def batches(store: Path) -> dict[int, str]:
    return {step: record.batch_digest for step, record in step_records(store).items()}


def test_a_run_killed_within_a_buffer_goes_on_exactly(data: Path, tmp_path: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert train_here(arguments(straight, data, *BUFFER, "--max-steps", "6")) == 0
    train_until_killed(arguments(killed, data, *BUFFER, "--max-steps", "6"), after=1)
    assert train_here(arguments(killed, None)) == 0
    assert step_records(killed) == step_records(straight)
    # Control: rows in the order of their files are other batches.
    plain = tmp_path / "plain"
    in_order = ("--row-order", "sequential", "--max-steps", "1")
    assert train_here(arguments(plain, data, *in_order)) == 0
    assert batches(plain)[1] != batches(straight)[1]


def test_a_buffer_that_changes_is_recorded_and_told(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, same = tmp_path / "run", tmp_path / "same"
    for each in (store, same):
        assert train_here(arguments(each, data, *BUFFER, "--max-steps", "1")) == 0
    larger = ("--shuffle-buffer-size", "50", "--max-steps", "2")
    assert train_here(arguments(store, None, *larger)) == 0
    assert train_here(arguments(same, None, "--max-steps", "2")) == 0
    assert "changed: shuffle_buffer_size from 10 to 50" in capsys.readouterr().err
    with shardb.open(store) as opened:
        stored = read_stored_run(opened)
    assert stored is not None
    assert stored.recipe.shuffle_buffer_size == 50
    assert batches(store)[2] != batches(same)[2]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--shuffle-buffer-size", "10"), "no effect without --row-order sequential"),
        ((*BUFFER, "--no-shuffle-train"), "--shuffle-buffer-size has no effect without --shuffle-"),
    ],
)
def test_a_buffer_without_effect_is_told(
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    says: str,
) -> None:
    run = arguments(tmp_path / "run", data, *flags, "--max-steps", "1", "--dry-run")
    assert train_here(run) == 0
    assert says in capsys.readouterr().out
