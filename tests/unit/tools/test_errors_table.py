"""Is docs/errors.md what the error classes say?"""

from __future__ import annotations

from pathlib import Path

import pytest

from shardb import errors
from shardb.errors import EXIT_CODES, ShardbError
from tools import errors_table


def all_classes() -> list[type[ShardbError]]:
    found = [value for value in vars(errors).values() if isinstance(value, type)]
    return [value for value in found if issubclass(value, ShardbError)]


def test_is_the_page_current() -> None:
    assert errors_table.main(["--check"]) == 0, "run `python -m tools.errors_table`"


def test_would_a_page_of_yesterday_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = tmp_path / "errors.md"
    stale.write_text(errors_table.page().replace("yes", "no", 1))
    monkeypatch.setattr(errors_table, "PAGE", stale)
    assert errors_table.main(["--check"]) == 1
    assert "run `python -m tools.errors_table`" in capsys.readouterr().err
    assert errors_table.main([]) == 0
    assert errors_table.main(["--check"]) == 0
    assert errors_table.main(["--write"]) == 2


def test_is_every_error_in_the_table_and_in_the_tree() -> None:
    listed = {error for _, error in errors_table.classes()}
    assert listed == set(all_classes())
    assert set(errors_table.next_steps()) == {error.__name__ for error in listed - {ShardbError}}


def test_has_every_error_a_kind_of_its_own_and_a_known_exit_code() -> None:
    kinds = [error.kind for error in all_classes()]
    assert len(set(kinds)) == len(kinds)
    for error in all_classes():
        assert error.exit_code in EXIT_CODES
        assert error.kind == error.kind.lower().replace(" ", "_")
        assert (error.__doc__ or "").endswith(".")


def test_is_the_tree_of_the_docstring_that_of_the_classes() -> None:
    """Its indentation shows who stands under whom, its numbers the exit codes."""
    lines = (errors.__doc__ or "").splitlines()
    told = {}
    for line in lines:
        if match := errors_table.TREE_LINE.match(line):
            told[match.group(1)] = (line.index(match.group(1)) // 4, line)
    for depth, error in errors_table.classes():
        if error is not ShardbError:
            assert told[error.__name__][0] == depth
        if depth == 1:
            assert f" {error.exit_code} " in told[error.__name__][1]


# Append only: scripts of users compare with these words.
KINDS = """
error usage incomplete_commit corruption format log_damaged log_truncated object_corrupt
object_missing not_found conflict branch_locked snapshot_exists storage_full storage_failed
commit_unknown remote_failed
""".split()


def test_are_the_kinds_of_yesterday_still_there() -> None:
    assert set(KINDS) <= {error.kind for error in all_classes()}
