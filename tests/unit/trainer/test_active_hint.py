"""Is the note of a run's active store kept by branch, and never in the way?"""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.active_hint import FILE_NAME, hinted_active, write_hint


def test_each_branch_has_its_own_note(tmp_path: Path) -> None:
    assert hinted_active(tmp_path, "main") is None
    write_hint(tmp_path, "main", "/ram/one")
    write_hint(tmp_path, "retry", "/ram/two")
    assert hinted_active(tmp_path, "main") == "/ram/one"
    write_hint(tmp_path, "main", None)
    assert hinted_active(tmp_path, "main") is None
    assert hinted_active(tmp_path, "retry") == "/ram/two"


def test_a_note_that_says_nothing_new_is_not_written(tmp_path: Path) -> None:
    write_hint(tmp_path, "main", None)
    assert not (tmp_path / "logs").exists()
    write_hint(tmp_path, "main", "/ram/one")
    before = (tmp_path / "logs" / FILE_NAME).stat()
    write_hint(tmp_path, "main", "/ram/one")
    assert (tmp_path / "logs" / FILE_NAME).stat().st_ino == before.st_ino


@pytest.mark.parametrize("text", ["", "{", "[]", '{"main": 7}', '{"main": null}', "\x00"])
def test_a_note_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / FILE_NAME).write_text(text)
    assert hinted_active(tmp_path, "main") is None
    write_hint(tmp_path, "main", "/ram/one")
    assert hinted_active(tmp_path, "main") == "/ram/one"
