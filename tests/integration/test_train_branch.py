"""Does a branch begin where it is told, train its own recipe, and leave the others alone?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shardb
from tests.support.active_runs import log_rows
from tests.support.training import arguments, step_records, train_here
from trainer.run_shards import Cursor, read_stored_run

RATE = ("--learning-rate", "0.001")


@pytest.fixture
def store(data: Path, tmp_path: Path) -> Path:
    """Train six steps on main, with the third one pinned."""
    store = tmp_path / "run"
    assert train_here(arguments(store, data, "--max-steps", "6", "--save-every", "3")) == 0
    return store


def heads(store: Path) -> dict[str, shardb.Commit]:
    with shardb.open(store) as opened:
        return opened.branches()


def lines_of(store: Path, branch: str) -> list[dict[str, object]]:
    log = store / "logs" / "branches" / branch / "steps.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_a_branch_without_changes_repeats_the_steps_of_its_line(store: Path) -> None:
    before = heads(store)["main"]
    args = arguments(store, None, "--branch", "retry", "--from", "step-3")
    assert train_here([*args, "--max-steps", "6"]) == 0
    after = heads(store)
    assert after["main"] == before
    assert after["retry"].shards == before.shards
    assert after["retry"].id != before.id
    assert after["retry"].branch == "retry"


def test_a_changed_recipe_trains_otherwise_and_is_in_the_log(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = heads(store)["main"]
    capsys.readouterr()
    args = arguments(store, None, "--branch", "retry", "--from", "step-3", *RATE)
    assert train_here(args) == 0
    out, err = capsys.readouterr()
    assert "changed: learning_rate from 0.003 to 0.001" in err
    assert "branch retry" in err
    assert [line.split()[0] for line in out.splitlines()] == ["step=4", "step=5", "step=6"]
    after = heads(store)
    assert after["main"] == before
    assert after["retry"].shards["params/lm_head"] != before.shards["params/lm_head"]
    rows = log_rows(store)
    changed = [
        (row["step"], row["branch"])
        for row in rows
        if "learning_rate 0.003 -> 0.001" in row["notes"]
    ]
    assert changed == [(4, "retry")]
    began = [row["step"] for row in rows if "branch retry" in row["notes"]]
    assert began == [3]
    # Each branch goes on by its own recipe, and main's step log was not touched.
    assert train_here(arguments(store, None, "--max-steps", "7")) == 0
    assert "branch" not in capsys.readouterr().err
    assert train_here(arguments(store, None, "--branch", "retry", "--max-steps", "7")) == 0
    assert f"{store}: branch retry, " in capsys.readouterr().err
    with shardb.open(store) as opened:
        rates = {
            branch: stored.recipe.learning_rate
            for branch in ("main", "retry")
            if (stored := read_stored_run(opened, branch)) is not None
        }
    assert rates == {"main": 0.003, "retry": 0.001}
    # A branch's step log begins with its past, made again from the commits.
    lines = lines_of(store, "retry")
    assert [line["step"] for line in lines] == list(range(1, 8))
    assert [line.get("rebuilt", False) for line in lines] == [True] * 3 + [False] * 4


def test_the_same_call_made_again_goes_on(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = arguments(store, None, "--branch", "retry", "--from", "step-3", *RATE)
    args += ["--skip-batches", "2"]
    assert train_here([*args, "--max-steps", "5"]) == 0
    fifth = heads(store)["retry"]
    capsys.readouterr()
    assert train_here([*args, "--max-steps", "7"]) == 0
    said = capsys.readouterr().err
    assert "goes on after step 5" in said
    assert "applied when this branch began" in said
    records = step_records(store)
    seventh = heads(store)["retry"]
    assert seventh.step == 7
    assert records[6].batch_digest != records[5].batch_digest
    # Two steps' rows were left out once, not twice.
    assert Cursor.of(fifth).position == (5 + 2) * 4
    assert Cursor.of(seventh).position == (7 + 2) * 4


def test_skipped_batches_are_those_that_would_have_come(
    store: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    straight = step_records(store)
    assert train_here(arguments(store, None, "--max-steps", "9")) == 0
    straight = step_records(store)
    args = arguments(store, None, "--branch", "retry", "--from", "step-3", "--skip-batches", "2")
    capsys.readouterr()
    assert train_here([*args, "--max-steps", "5"]) == 0
    assert "skipping 8 rows" in capsys.readouterr().err
    with shardb.open(store) as opened:
        digests = [
            record["metrics"]["batch_digest"]
            for record in opened.history()
            if record["kind"] == "commit" and record["branch"] == "retry"
        ]
    assert digests == [straight[6].batch_digest, straight[7].batch_digest]
    rows = log_rows(store)
    assert [n for row in rows for n in row["notes"] if "position" in n] == ["position 12 -> 20"]
    # Tokens that were passed over were not trained on: the schedule does not see them.
    head = heads(store)["retry"]
    assert head.metrics["tokens_seen"] == 5 * 4 * 16
    # Nothing of the recipe changed, so its shard is the one of the beginning.
    assert head.shards["meta/recipe"].step == 0


def test_skipping_on_the_branch_that_goes_on(store: Path) -> None:
    assert train_here(arguments(store, None, "--max-steps", "7", "--skip-batches", "1")) == 0
    assert Cursor.of(heads(store)["main"]).position == 8 * 4
    # It is done once: the next call goes on from there.
    assert train_here(arguments(store, None, "--max-steps", "8")) == 0
    assert Cursor.of(heads(store)["main"]).position == 9 * 4


def test_snapshots_of_a_branch_have_its_name(store: Path) -> None:
    args = arguments(store, None, "--branch", "retry", "--from", "step-3", *RATE)
    assert train_here([*args, "--max-steps", "6"]) == 0
    with shardb.open(store) as opened:
        steps = {name: commit.branch for name, commit in opened.snapshots().items()}
    assert steps == {"step-3": "main", "step-6": "main", "retry-step-6": "retry"}


def test_a_run_may_begin_on_a_branch_of_another_name(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "named"
    assert train_here(arguments(store, data, "--branch", "first", "--max-steps", "1")) == 0
    assert list(heads(store)) == ["first"]
    capsys.readouterr()
    assert train_here(arguments(store, None, "--max-steps", "2")) == 4
    assert "there are first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (("--from", "step-3"), 2, "--branch"),
        (("--branch", "new"), 4, "--from"),
        (("--branch", "new", "--from", "step-99"), 4, "step 99"),
        (("--branch", "main", "--from", "step-3"), 5, "did not begin at step 3"),
        (("--branch", "step-9", "--from", "step-3"), 2, "step-9"),
        (("--branch", "no good", "--from", "step-3"), 2, "no good"),
        (("--branch", "new", "--from", "step-3", "--hidden-size", "64"), 2, "--hidden-size"),
        (("--skip-batches", "-1"), 2, "--skip-batches"),
    ],
)
def test_what_cannot_be_is_refused_and_makes_nothing(
    store: Path,
    flags: tuple[str, ...],
    code: int,
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = heads(store)
    capsys.readouterr()
    assert train_here(arguments(store, None, "--max-steps", "7", *flags)) == code
    assert says in capsys.readouterr().err
    assert heads(store) == before


def test_another_beginning_than_the_branch_has_is_refused(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments(store, None, "--branch", "retry", "--max-steps", "5")
    assert train_here([*args, "--from", "step-3"]) == 0
    capsys.readouterr()
    assert train_here([*args, "--from", "step-6"]) == 5
    assert "did not begin at step 6" in capsys.readouterr().err
    assert train_here([*args, "--from", "step-5"]) in (2, 5)


def test_an_earlier_step_than_the_branch_began_at_is_refused(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments(store, None, "--branch", "late")
    assert train_here([*args, "--from", "step-6", "--max-steps", "7"]) == 0
    capsys.readouterr()
    # Behind step 3 comes step 4 of main, not the first step of the branch.
    assert train_here([*args, "--from", "step-3", "--max-steps", "8"]) == 5
    assert "did not begin at step 3" in capsys.readouterr().err
    assert heads(store)["late"].step == 7
    assert train_here([*args, "--from", "step-6", "--max-steps", "8"]) == 0


def test_there_is_nothing_to_begin_from_without_a_store(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments(tmp_path / "none", data, "--branch", "retry", "--from", "step-3")
    assert train_here(args) == 4
    assert "no store" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("branch", ["no good", "step-3", "", "../up"])
def test_a_name_that_cannot_be_makes_no_store(
    data: Path, tmp_path: Path, branch: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments(tmp_path / "none", data, "--branch", branch, "--max-steps", "1")
    assert train_here(args) == 2
    assert "branch" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_dry_run_of_a_branch_begins_none(store: Path) -> None:
    args = arguments(store, None, "--branch", "retry", "--from", "step-3", "--dry-run")
    assert train_here(args) == 0
    assert list(heads(store)) == ["main"]
