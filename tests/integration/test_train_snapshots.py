"""Are snapshots pinned at the steps and the best losses that were asked for, and kept exact?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import shardb
from tests.support.active_runs import pinned_steps, published_steps
from tests.support.training import arguments, step_lines, train_here
from trainer.engine import Engine, EvalResult


def validating(data: Path, *more: str) -> tuple[str, ...]:
    return ("--val-data-dir", str(data / "val"), "--validate-every", "1", *more)


def told_losses(monkeypatch: pytest.MonkeyPatch, *losses: float) -> None:
    """Let validations give the losses of a list, one after the other."""
    left = list(losses)

    def evaluate(engine: Engine, reader: object, batches: object) -> EvalResult:
        return EvalResult(loss=left.pop(0), tokens=1, batches=1)

    monkeypatch.setattr(Engine, "evaluate", evaluate)


def test_the_best_loss_is_pinned_and_the_one_it_beats_let_go(
    data: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_losses(monkeypatch, 4.0, 3.0, 3.5, 2.0, 2.0, 2.5)
    flags = validating(data, "--snapshot-best", "--max-steps", "6")
    assert train_here(arguments(store, data, *flags)) == 0
    assert pinned_steps(store) == {"best-step-4": 4}
    bests = [line["best_validation_loss"] for line in step_lines(store)]
    assert bests == [4.0, 3.0, 3.0, 2.0, 2.0, 2.0]
    # The pinned commit is whole: its shards can be read although others came after it.
    with shardb.open(store) as opened, opened.snapshot("best-step-4") as view:
        assert all(view.read(name).bytes for name in view.names())
        assert view.commit.metrics["validation_loss"] == 2.0


def test_a_resumed_run_remembers_its_best(
    data: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_losses(monkeypatch, 4.0, 3.0, 3.5, 3.2, 2.9)
    flags = validating(data, "--snapshot-best", "--max-steps", "2")
    assert train_here(arguments(store, data, *flags)) == 0
    assert train_here(arguments(store, None, "--max-steps", "4")) == 0
    assert pinned_steps(store) == {"best-step-2": 2}
    assert train_here(arguments(store, None, "--max-steps", "5")) == 0
    assert pinned_steps(store) == {"best-step-5": 5}


def test_a_best_that_a_kill_left_unpinned_is_pinned_at_the_next_start(
    data: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_losses(monkeypatch, 4.0, 3.0, 3.5)
    flags = validating(data, "--snapshot-best", "--max-steps", "2")
    assert train_here(arguments(store, data, *flags)) == 0
    with shardb.open(store) as opened:
        shardb.branching.delete_snapshot(opened, "best-step-2")
    assert train_here(arguments(store, None, "--max-steps", "3")) == 0
    assert pinned_steps(store) == {"best-step-2": 2}


def test_another_measure_begins_a_best_of_its_own(
    data: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_losses(monkeypatch, 2.0, 3.0, 2.9)
    flags = validating(data, "--snapshot-best", "--max-steps", "1")
    assert train_here(arguments(store, data, *flags)) == 0
    more = ("--max-validation-batches", "3", "--max-steps", "3")
    assert train_here(arguments(store, None, *more)) == 0
    assert pinned_steps(store) == {"best-step-1": 1, "best-step-3": 3}


def test_the_best_of_an_active_run_is_pinned_in_the_durable_store(
    data: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_losses(monkeypatch, 4.0, 3.0, 3.5, 2.0, 2.2)
    active = tmp_path / "active"
    flags = validating(data, "--snapshot-best", "--max-steps", "5", "--active", str(active))
    assert train_here(arguments(store, data, *flags)) == 0
    assert pinned_steps(store) == {"best-step-4": 4}
    assert pinned_steps(active) == {}
    assert published_steps(store) == [0, 1, 2, 4, 5]


@pytest.mark.parametrize("flags", [(), ("--validate-every", "0")])
def test_a_best_without_losses_is_refused(
    data: Path,
    store: Path,
    flags: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    val = ("--val-data-dir", str(data / "val")) if flags else ()
    assert train_here(arguments(store, data, "--snapshot-best", *flags, *val)) == 2
    assert "--snapshot-best" in capsys.readouterr().err
    assert not store.exists()


def test_validation_takes_as_many_batches_as_it_is_told_and_whole_ones_if_asked(
    data: Path, tmp_path: Path
) -> None:
    rows = np.load(data / "val" / "rows_000.npy")
    few = tmp_path / "few"
    few.mkdir()
    np.save(few / "rows.npy", rows[:10])
    counted = {}
    for name, flags in {
        "all": (),
        "at most two": ("--max-validation-batches", "2"),
        "whole": ("--validation-whole-batches",),
    }.items():
        store = tmp_path / name
        flags = ("--val-data-dir", str(few), "--validate-every", "1", "--max-steps", "1", *flags)
        assert train_here(arguments(store, data, *flags)) == 0
        [line] = step_lines(store)
        counted[name] = (line["validation_batches"], line["validation_tokens"])
    assert counted == {"all": (3, 160), "at most two": (2, 128), "whole": (2, 128)}


def test_no_whole_batch_at_all_is_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = tmp_path / "few"
    few.mkdir()
    np.save(few / "rows.npy", np.load(data / "val" / "rows_000.npy")[:3])
    flags = ("--val-data-dir", str(few), "--validation-whole-batches")
    assert train_here(arguments(tmp_path / "run", data, *flags)) == 2
    assert "not one whole batch of 4" in capsys.readouterr().err
