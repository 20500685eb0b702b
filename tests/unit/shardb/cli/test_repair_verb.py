"""Does `repair` announce what it does, do it only when told, and end with the right exit code?"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import shardb
from tests.support import damage as d
from tests.support.commands import Ask, check_refused
from tests.support.small_stores import commit_step, copy_store, fsck, tree


@pytest.fixture
def empty(quick_path: Path) -> Path:
    shardb.open(quick_path / "empty", create=True).close()
    return quick_path / "empty"


def test_is_nothing_to_do_said(ask: Ask, run: Path) -> None:
    for more in ([], ["--yes"]):
        answer = ask("repair", run, *more)
        assert (answer.code, answer.out) == (0, "nothing to repair\n")
    told = ask("repair", run, "--json").json
    assert told == {"actions": [], "unmended": [], "done": False, "loses": False, "remaining": []}


def test_is_everything_announced_before_it_is_done(ask: Ask, run: Path) -> None:
    d.spoil_object(2, "params/a")(run)
    d.remove("FORMAT")(run)
    before = tree(run)
    answer = ask("repair", run)
    assert (answer.code, tree(run) == before) == (1, True)
    lines = answer.out.splitlines()
    assert lines[0] == "would be done: FORMAT is written anew from the log: it is damaged"
    assert "would be done: snapshot step-2 is dropped" in lines
    assert "lost for good: step 2 under the name step-2: params/a cannot be read" in lines
    assert lines[-2].startswith("nothing was changed")
    assert lines[-1] == f"to do it: shardb repair {run} --yes"
    done = ask(*shlex.split(lines[-1])[4:])
    assert done.code == 1, "something was lost"
    assert done.out.splitlines()[-1] == "repaired; what was lost was said above"
    assert ask("fsck", run).code == 0
    assert ask("show", run, "--json").json["step"] == 6


def test_is_a_repair_without_a_loss_fine(ask: Ask, run: Path, quick_path: Path) -> None:
    other = copy_store(run, quick_path / "a copy")
    d.spoil_object(2, "params/a")(run)
    d.spoil_record(5)(run)
    answer = ask("repair", run, "--from", other)
    assert answer.code == 1
    assert "lost for good" not in answer.out
    again = answer.out.splitlines()[-1].removeprefix("to do it: ")
    assert shlex.split(again) == ["shardb", "repair", str(run), "--from", str(other), "--yes"]
    done = ask(*shlex.split(again)[1:])
    assert (done.code, done.out.splitlines()[-1]) == (0, "repaired; nothing was lost")
    assert fsck(run).findings == []


def test_is_the_document_the_same_before_and_after(ask: Ask, run: Path) -> None:
    d.remove_object(6, "params/a")(run)
    planned = ask("repair", run, "--json")
    done = ask("repair", run, "--yes", "--json")
    assert (planned.code, done.code) == (1, 1)
    assert done.json == {**planned.json, "done": True}
    (action,) = done.json["actions"]
    assert set(action) == {"what", "path", "does", "loses"}
    assert action["what"] == "branch_rewind"


def test_are_choices_taken_and_repeated(ask: Ask, run: Path) -> None:
    d.remove_object(6, "params/a")(run)
    d.remove_object(2, "params/a")(run)
    answer = ask("repair", run, "--rewind", "main", "--to", "step-5")
    assert "cannot be mended: snapshot step-2 stays damaged" in answer.out
    again = answer.out.splitlines()[-1]
    assert again.endswith("--rewind main --to step-5 --yes")
    assert ask(*shlex.split(again)[4:]).code == 1
    assert ask("repair", run, "--drop", "step-2", "--yes").code == 1
    assert ask("fsck", run).code == 0


def test_is_a_log_cut_only_when_that_is_wanted(ask: Ask, run: Path) -> None:
    d.spoil_record(-3)(run)
    assert "the log goes on in a new segment" in ask("repair", run).out
    cut = ask("repair", run, "--cut")
    assert "the log is cut at byte" in cut.out
    assert "lost for good: step 6 of main" in cut.out
    assert cut.out.splitlines()[-1].endswith("--cut --yes")


def test_is_what_nobody_has_said_to_be_missing(ask: Ask, run: Path) -> None:
    d.remove_object(6, "meta/recipe")(run)
    answer = ask("repair", run, "--yes")
    assert answer.code == 1
    assert "cannot be mended" in answer.out
    assert "to do it" not in ask("repair", run).out


def test_is_nothing_given_up_for_a_store_that_has_nothing(ask: Ask, run: Path, empty: Path) -> None:
    d.remove_object(6, "params/a")(run)
    before = tree(run)
    answer = ask("repair", run, "--from", empty, "--yes")
    assert (answer.code, tree(run) == before) == (4, True)
    assert "lost for good: step 6 of main: params/a cannot be read" in answer.out
    assert "has nothing of what is damaged here, so nothing was changed" in answer.err
    assert ask("repair", run, "--from", empty, "--yes", "--json").code == 4
    assert ask("repair", run, "--yes").code == 1, "without --from it is given up"
    assert ask("fsck", run).code == 0


def test_are_steps_told_once_and_branches_by_name(ask: Ask, run: Path, quick_path: Path) -> None:
    other = copy_store(run, quick_path / "a copy")
    for root in (run, other):
        assert ask("branch", root, "second", "--from", "step-6").code == 0
        with shardb.open(root) as store:
            commit_step(store, 7, branch="second")
            commit_step(store, 7)
    d.remove_object(6, "meta/recipe")(run)
    said = ask("repair", run, "--from", other).out
    assert "meta/recipe of steps 2, 6, 7 (branches main, second)" in said


def test_are_wrong_calls_refused(ask: Ask, run: Path, tmp_path: Path) -> None:
    check_refused(ask("repair", run, "--rewind", "main"), 2, "--to")
    check_refused(ask("repair", run, "--to", "step-5"), 2, "--rewind")
    check_refused(ask("repair", run, "--from", run), 2, "is to be repaired")
    check_refused(ask("repair", run, "--from", tmp_path), 4, "no store here")
    check_refused(ask("repair", tmp_path / "nowhere", "--yes"), 4, "no store here")
    check_refused(ask("repair", run, "--drop", "bset"), 4, "there is no snapshot")
    d.without_index(d.remove("wal"))(run)
    check_refused(ask("repair", run, "--yes"), 3, "neither the log nor the index")


def test_is_a_store_in_use_named(ask: Ask, run: Path) -> None:
    with shardb.open(run) as store, store.begin():
        d.remove("FORMAT")(run)
        check_refused(ask("repair", run, "--yes"), 5, "has this store open", "process ")
