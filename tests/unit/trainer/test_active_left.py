"""Is an active store that is gone, or left behind, told of where somebody has to know?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.active_hint import write_hint
from trainer.active_left import gone_text, left_text


@pytest.fixture
def active(tmp_path: Path) -> Path:
    """Give an active store that branch main of the store beside it was trained in."""
    (tmp_path / "active").mkdir()
    (tmp_path / "active" / "FORMAT").touch()
    write_hint(tmp_path / "run", "main", str(tmp_path / "active"))
    return tmp_path / "active"


def test_is_a_store_that_is_there_or_was_never_used_not_called_gone(active: Path) -> None:
    run = active.parent / "run"
    assert gone_text(run, "main", 3) is None
    assert gone_text(run, "retry", 3) is None


@pytest.mark.parametrize(
    ("last", "words"),
    [(3, "the step log has none behind it"), (4, "to step 4 in the step log"), (9, "to step 9")],
)
def test_what_is_lost_with_a_store_that_is_gone(last: int, words: str, active: Path) -> None:
    run = active.parent / "run"
    (run / "logs" / "steps.jsonl").write_text(json.dumps({"step": last, "loss": 1.0}) + "\n")
    (active / "FORMAT").unlink()
    told = gone_text(run, "main", 3)
    assert told is not None
    assert told.startswith(f"{active}: the active store is gone")
    assert words in told


def test_is_a_folder_that_another_branch_uses_not_to_be_removed(active: Path) -> None:
    run = active.parent / "run"
    told = left_text(run, "main", None, ["main", "retry"])
    assert told is not None
    assert told.startswith(f"{active}: training goes on without this folder")
    assert left_text(run, "main", str(active.parent / "x" / ".." / "active"), ["main"]) is None
    write_hint(run, "retry", str(active))
    assert left_text(run, "main", None, ["main", "retry"]) is None
    assert left_text(run, "other", None, ["main"]) is None
