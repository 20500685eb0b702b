"""Do branch, branches, rewind, rm and policy do what they say, and say what they do?"""

from __future__ import annotations

from pathlib import Path

import pytest

import shardb
from tests.support.commands import Ask, check_refused
from tests.support.small_stores import commit_step, fsck, tree


def steps(ask: Ask, run: Path) -> list[int]:
    """The retained steps."""
    found: list[int] = ask("info", run, "--json").json["retained_steps"]
    return found


# branch, branches


def test_does_a_branch_begin_where_it_is_told(ask: Ask, run: Path) -> None:
    told = ask("branch", run, "side", "--from", "step-2", "--json").json
    assert (told["branch"], told["step"], told["created"]) == ("side", 2, True)
    assert "step 6" in ask("branch", run, "other").out
    with shardb.open(run) as store:
        commit_step(store, 3, branch="side")
    found = {row["branch"]: row for row in ask("branches", run, "--json").json}
    assert (found["side"]["step"], found["side"]["retained_steps"]) == (3, [2, 3])
    assert (found["main"]["step"], found["main"]["writer"]) == (6, None)
    assert "steps 2, 3" in ask("branches", run).out
    assert fsck(run).findings == []


def test_is_the_same_branch_twice_fine_and_elsewhere_a_conflict(ask: Ask, run: Path) -> None:
    ask("branch", run, "side", "--from", "step-5")
    again = ask("branch", run, "side", "--from", "step-5")
    assert (again.code, "was there already" in again.out) == (0, True)
    check_refused(ask("branch", run, "side"), 5, "side")
    check_refused(ask("branch", run, "step-7"), 2, "step-N")
    check_refused(ask("branch", run, "step-2"), 2)
    check_refused(ask("branch", run, "a b"), 2)
    check_refused(ask("branch", run), 2, "NAME")
    check_refused(ask("branch", run, "x", "--from", "step-3"), 4, "2, 5, 6")


def test_do_branches_name_the_writer(ask: Ask, run: Path) -> None:
    with shardb.open(run) as store, store.begin():
        (row,) = ask("branches", run, "--json").json
        assert row["writer"]["pid"] > 0
        assert "written by process" in ask("branches", run).out


def test_has_an_empty_store_no_branch(ask: Ask, root: Path) -> None:
    ask("init", root)
    assert ask("branches", root, "--json").json == []
    assert "no branch" in ask("branches", root).out
    check_refused(ask("branch", root, "side"), 4, "no commit yet")


# rewind


def test_is_a_rewind_told_and_can_be_undone_as_it_says(ask: Ask, run: Path) -> None:
    told = ask("rewind", run, "main", "--to", "step-5", "--json").json
    assert (told["from"]["step"], told["to"]["step"]) == (6, 5)
    assert [row["step"] for row in told["left_behind"]] == [6]
    assert ask("show", run, "--json").json["step"] == 5
    undone = ask(*told["undo"].split()[1:])
    assert (undone.code, "step 5 -> step 6" in undone.out) == (0, True)
    assert ask("show", run, "--json").json["step"] == 6


def test_does_a_rewind_say_what_it_leaves_behind(ask: Ask, run: Path) -> None:
    with shardb.open(run) as store:
        head = store.resolve()
    said = ask("rewind", run, "main", "--to", "step-2").out.splitlines()
    assert said[0].startswith("branch main: step 6 -> step 2 ")
    assert said[1] == "left behind until `shardb gc`: steps 5, 6"
    assert said[2] == f"to undo it: shardb rewind {run} main --to {head.id}"
    again = ask("rewind", run, "main", "--to", "step-2")
    assert (again.code, "already" in again.out) == (0, True)
    ask("gc", run)
    check_refused(ask("rewind", run, "main", "--to", head.id), 4)


def test_are_bad_rewinds_refused(ask: Ask, run: Path) -> None:
    before = tree(run / "wal")
    check_refused(ask("rewind", run, "mian", "--to", "step-5"), 4, "did you mean main")
    check_refused(ask("rewind", run, "main", "--to", "step-4"), 4, "2, 5, 6")
    check_refused(ask("rewind", run, "main"), 2, "--to")
    check_refused(ask("rewind", run), 2, "BRANCH")
    with shardb.open(run) as store, store.begin() as txn:
        check_refused(ask("rewind", run, "main", "--to", "step-5"), 5, "already has a writer")
        txn.abort()
    assert (tree(run / "wal") == before) is False, "the control: a transaction is logged"
    assert ask("show", run, "--json").json["step"] == 6


# rm


def test_is_a_snapshot_removed_and_what_goes_with_it_told(ask: Ask, run: Path) -> None:
    dry = ask("rm", run, "step-2", "--dry-run", "--json").json
    assert (dry["kind"], dry["step"], [c["step"] for c in dry["lost"]]) == ("snapshot", 2, [2])
    assert steps(ask, run) == [2, 5, 6]
    told = ask("rm", run, "step-2", "--json").json
    assert told == {**dry, "dry_run": False}
    assert told["freed_bytes"] == 3 * 10_096  # the shard that no step writes stays
    assert steps(ask, run) == [5, 6]
    check_refused(ask("rm", run, "step-2"), 4, "there is no snapshot or branch")
    assert fsck(run).findings == []


def test_is_nothing_lost_with_a_second_name(ask: Ask, run: Path) -> None:
    ask("snapshot", run, "best", "--ref", "step-2")
    told = ask("rm", run, "step-2")
    assert (told.code, "no step is lost" in told.out) == (0, True)
    assert steps(ask, run) == [2, 5, 6]


def test_does_a_branch_with_steps_of_its_own_need_a_yes(ask: Ask, run: Path) -> None:
    ask("branch", run, "side", "--from", "step-5")
    assert ask("rm", run, "side").code == 0
    ask("branch", run, "side", "--from", "step-5")
    with shardb.open(run) as store:
        for step in (7, 8):
            commit_step(store, step, branch="side")
    check_refused(ask("rm", run, "side"), 2, "steps 7, 8", "--yes")
    told = ask("rm", run, "side", "--yes", "--json").json
    assert [row["step"] for row in told["lost"]] == [7, 8]
    assert steps(ask, run) == [2, 5, 6]
    assert fsck(run).findings == []


def test_is_the_last_branch_kept(ask: Ask, run: Path) -> None:
    check_refused(ask("rm", run, "main", "--yes"), 2, "only one")
    check_refused(ask("rm", run, "mian"), 4, "did you mean main")
    check_refused(ask("rm", run), 2, "NAME")


def test_does_what_a_reader_holds_stay_until_it_is_done(ask: Ask, run: Path) -> None:
    with shardb.open(run) as store, store.at(step=2) as view:
        told = ask("rm", run, "step-2", "--json").json
        assert [row["leased"] for row in told["lost"]] == [True]
        assert view.read("params/a").array("w")[0] == 20
        assert fsck(run).findings == []


def test_is_a_written_branch_not_removed(ask: Ask, run: Path) -> None:
    ask("branch", run, "side")
    with shardb.open(run) as store, store.begin("side"):
        check_refused(ask("rm", run, "side", "--yes"), 5, "already has a writer")


# policy


def test_is_a_policy_told_tried_and_set(ask: Ask, run: Path) -> None:
    assert ask("policy", run, "--json").json["policy"]["keep_last"] == 2
    dry = ask("policy", run, "--keep-last", 1, "--dry-run", "--json").json
    assert [row["step"] for row in dry["dropped"]] == [5]
    assert steps(ask, run) == [2, 5, 6]
    said = ask("policy", run, "--keep-last", 1).out
    assert "gone: step 5; 30.3 kB" in said
    assert steps(ask, run) == [2, 6]
    assert fsck(run).findings == []


def test_does_a_policy_hold_for_the_next_commits(ask: Ask, run: Path) -> None:
    ask("policy", run, "--keep-last", 1, "--keep-every", 4, "--keep-best", 1, "--metric", "loss")
    assert ask("policy", run, "--mode", "max").code == 0
    assert "the 1 of the highest loss" in ask("policy", run).out
    with shardb.open(run) as store:
        for step in range(7, 14):
            commit_step(store, step)
    assert steps(ask, run) == [2, 6, 8, 12, 13]  # 6 has the highest loss that is still there
    ask("policy", run, "--keep-best", "off", "--keep-every", "off")
    assert steps(ask, run) == [2, 13]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--keep-last", "0"),
        ("--keep-last", "-1"),
        ("--keep-last", "off"),
        ("--keep-last", "1.5"),
        ("--keep-last", "x"),
        ("--keep-every", "0"),
        ("--keep-every", "-3"),
        ("--keep-best", "0"),
        ("--keep-best", ""),
        ("--mode", "least"),
        ("--metric", "loss"),
    ],
)
def test_is_a_policy_that_nobody_means_refused(
    ask: Ask, run: Path, option: str, value: str
) -> None:
    check_refused(ask("policy", run, option, value), 2)
    assert steps(ask, run) == [2, 5, 6]
    assert ask("policy", run, "--json").json["policy"]["keep_last"] == 2


def test_is_a_misspelt_metric_told(ask: Ask, run: Path) -> None:
    answer = ask("policy", run, "--keep-best", 1, "--metric", "los")
    assert answer.code == 0
    assert "did you mean loss" in answer.err
