"""Is the best validation kept by its own rule, and pinned under a name that never moves?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

import shardb
from shardb.errors import StorageFullError
from trainer.best import Best, best_after
from trainer.pins import beaten_bests, drop, pin, pins_of
from trainer.recipe import Settings

SETTINGS = Settings(data_dir="rows", snapshot_every=10, snapshot_best=True)


def best_of(*losses: float, measure: str = "rows") -> Best | None:
    best = None
    for step, loss in enumerate(losses, 1):
        best = best_after(best, loss=loss, step=step, measure=measure)
    return best


def test_the_lowest_loss_is_the_best_and_the_first_of_equals() -> None:
    assert best_of(3.0, 2.0, 2.5, 2.0) == Best(loss=2.0, step=2, measure="rows")
    assert best_of() is None


def test_a_loss_that_is_not_a_number_is_no_best() -> None:
    assert best_of(float("nan"), float("inf")) is None
    found = best_of(3.0, float("nan"))
    assert found is not None
    assert found.step == 1


def test_losses_of_other_rows_are_not_compared() -> None:
    old = best_of(1.0)
    new = best_after(old, loss=5.0, step=9, measure="more rows")
    assert new == Best(loss=5.0, step=9, measure="more rows")


def test_a_best_reads_back_as_it_was_written() -> None:
    best = best_of(0.1 + 0.2)
    assert best is not None
    assert Best.from_json(best.to_json()) == best
    assert Best.from_json(None) is None


@pytest.fixture
def store(tmp_path: Path) -> Iterator[shardb.Store]:
    with shardb.open(tmp_path / "run", create=True) as opened:
        yield opened


def commit(
    store: shardb.Store, step: int, best: Best | None = None, branch: str = "main"
) -> shardb.Commit:
    with store.begin(branch) as txn:
        txn.write("params/a", {"x": np.full(3, float(step))})
        return txn.commit(step=step, state={"best": None if best is None else best.to_json()})


@pytest.mark.parametrize(
    ("step", "best_step", "branch", "names"),
    [
        (0, 0, "main", ["best-step-0"]),
        (7, 3, "main", []),
        (10, 3, "main", ["step-10"]),
        (10, 10, "main", ["step-10", "best-step-10"]),
        (10, 10, "retry", ["retry-step-10", "retry-best-step-10"]),
        (20, 20, "lr/low", ["lr/low-step-20", "lr/low-best-step-20"]),
    ],
)
def test_names_say_step_best_and_branch(
    store: shardb.Store, step: int, best_step: int, branch: str, names: list[str]
) -> None:
    made = commit(store, step, Best(loss=1.0, step=best_step, measure="rows"), branch)
    assert pins_of(made, SETTINGS, branch) == names
    off = Settings(data_dir="rows")
    assert pins_of(made, off, branch) == []
    for name in names:
        assert pin(store, made, name, branch) is None
    assert sorted(store.snapshots()) == sorted(names)


def test_a_new_best_takes_the_place_of_the_one_it_beats(store: shardb.Store) -> None:
    for step, loss in ((5, 3.0), (9, 2.0)):
        made = commit(store, step, Best(loss=loss, step=step, measure="rows"))
        pin(store, made, f"best-step-{step}", "main")
    assert list(store.snapshots()) == ["best-step-9"]


def test_what_a_best_does_not_beat_stays(store: shardb.Store) -> None:
    """A lower loss of an abandoned line, another measure, another branch, a name of one's own."""
    kept = {
        "best-step-3": Best(loss=1.0, step=3, measure="rows"),
        "best-step-4": Best(loss=9.0, step=4, measure="other rows"),
        "retry-best-step-5": Best(loss=9.0, step=5, measure="rows"),
        "best-step-mine": Best(loss=9.0, step=6, measure="rows"),
    }
    for name, best in kept.items():
        store.create_snapshot(name, commit(store, best.step, best).id)
    made = commit(store, 8, Best(loss=2.0, step=8, measure="rows"))
    pin(store, made, "best-step-8", "main")
    assert set(store.snapshots()) == {*kept, "best-step-8"}
    # Control: the same pins do go when they are beaten.
    better = commit(store, 9, Best(loss=0.5, step=9, measure="rows"))
    pin(store, better, "best-step-9", "main")
    assert set(store.snapshots()) == {*kept, "best-step-9"} - {"best-step-3"}


def test_a_step_that_is_no_best_beats_nothing(store: shardb.Store) -> None:
    first = commit(store, 5, Best(loss=3.0, step=5, measure="rows"))
    pin(store, first, "best-step-5", "main")
    later = commit(store, 10, Best(loss=3.0, step=5, measure="rows"))
    pin(store, later, "step-10", "main")
    assert beaten_bests(store.snapshots(), "step-10", "main") == []
    assert set(store.snapshots()) == {"best-step-5", "step-10"}


def test_a_name_that_pins_another_commit_is_left_and_told(store: shardb.Store) -> None:
    first, second = commit(store, 1), commit(store, 2)
    store.create_snapshot("mine", first.id)
    told = pin(store, second, "mine", "main")
    assert told is not None
    assert "was left as it is" in told
    assert store.snapshots()["mine"].id == first.id
    drop(store, "mine")
    drop(store, "mine")
    assert store.snapshots() == {}


def test_is_a_snapshot_kept_whose_index_cannot_be_written(
    store: shardb.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record is in the log, and the index is caught up when there is room again."""
    made = commit(store, 5, Best(loss=3.0, step=5, measure="rows"))

    def refuse(_: object) -> NoReturn:
        raise StorageFullError("no space for the index")

    monkeypatch.setattr(store.index, "write", refuse)
    assert pin(store, made, "best-step-5", "main") is None
    assert store.snapshots() == {}
    monkeypatch.undo()
    pin(store, commit(store, 9, Best(loss=2.0, step=9, measure="rows")), "best-step-9", "main")
    assert list(store.snapshots()) == ["best-step-9"]
