"""Does every name mean one commit, and does a wrong one say what there is?"""

from __future__ import annotations

from typing import Any

import pytest

from shardb import refs, state
from shardb.errors import ConflictError, NotFoundError, UsageError
from shardb.refs import Wanted
from shardb.state import DictTables
from tests.support.log_records import applied, commit, record

C1, C2, C3, D3 = "aaaa1111" * 4, "aaaa2222" * 4, "bbbb3333" * 4, "cccc4444" * 4


@pytest.fixture
def tables() -> DictTables:
    """Steps 1 to 3 on main (step 1 under a snapshot), step 3 of a side branch from step 2."""
    return applied(
        [
            record("init", store_id="ab"),
            commit(C1, 1, None, 1),
            record("snapshot", name="best", commit=C1),
            commit(C2, 2, C1, 2),
            record("branch", name="side", commit=C2),
            commit(C3, 3, C2, 3),
            commit(D3, 3, C2, 4, branch="side"),
        ]
    )


@pytest.mark.parametrize(
    ("ref", "expected"),
    [
        (None, C3),
        ("main", C3),
        ("side", D3),
        ("best", C1),
        ("step-1", C1),
        ("step-2", C2),
        ("step-3", C3),
        ("step-03", C3),
        (C1, C1),
        ("aaaa1", C1),
        ("AAAA1", C1),
        ("bbbb", C3),
    ],
)
def test_does_a_name_mean_its_commit(tables: DictTables, ref: str | None, expected: str) -> None:
    assert refs.resolve(tables, ref).id == expected


def test_is_a_step_looked_for_on_the_branch_that_was_named(tables: DictTables) -> None:
    assert refs.resolve(tables, "step-3", branch="side").id == D3
    assert refs.commit_of_step(tables, 3).id == C3


@pytest.mark.parametrize("ref", ["aaaa", "aaa"])
def test_is_a_beginning_that_fits_twice_refused(tables: DictTables, ref: str) -> None:
    expected = UsageError if len(ref) >= refs.PREFIX_LENGTH_MIN else NotFoundError
    with pytest.raises(expected):
        refs.resolve(tables, ref)


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("mian", "did you mean main"),
        ("bset", "did you mean best"),
        ("step-9", "step 9 is not retained; retained steps: 1, 2, 3"),
        ("step-99999999999999999999999", "there is no"),
        ("step-3\n", "there is no"),
        ("step--3", "there is no"),
        ("zzzzzz", "there are: main, side, best, step-1"),
        ("", "there is no"),
        ("x" * 10_000, "there is no"),
    ],
)
def test_does_a_wrong_name_say_what_there_is(tables: DictTables, ref: str, message: str) -> None:
    with pytest.raises(NotFoundError, match=message) as caught:
        refs.resolve(tables, ref)
    assert caught.value.exit_code == 4


def test_is_a_store_without_commits_told_as_such() -> None:
    with pytest.raises(NotFoundError, match="no commit yet"):
        refs.resolve(DictTables(), None)
    with pytest.raises(NotFoundError, match="there are: none"):
        refs.resolve(DictTables(), "main")
    with pytest.raises(NotFoundError, match="retained steps: none"):
        refs.resolve(DictTables(), "step-1")


def test_is_a_step_on_several_other_branches_refused(tables: DictTables) -> None:
    applied([record("branch", name="third", commit=C2)], tables)
    applied([commit("d" * 32, 4, D3, 5, branch="side")], tables)
    applied([commit("e" * 32, 4, C2, 6, branch="third")], tables)
    with pytest.raises(UsageError, match="several branches"):
        refs.commit_of_step(tables, 4)


def test_does_what_a_rewind_left_come_last(tables: DictTables) -> None:
    applied([record("rewind", branch="main", to=C2), commit("f" * 32, 3, C2, 7)], tables)
    assert refs.resolve(tables, "step-3").id == "f" * 32
    assert refs.resolve(tables, C3).id == C3


def test_are_commits_listed_by_step_without_the_condemned(tables: DictTables) -> None:
    applied([commit("f" * 32, 4, C3, 7), commit("9" * 32, 5, "f" * 32, 7)], tables)
    assert [c.id for c in refs.live_commits(tables)] == [C1, C2, D3, "f" * 32, "9" * 32]
    assert tables.get("commits", C3) is not None
    with pytest.raises(NotFoundError):
        refs.resolve(tables, C3)


def test_are_heads_and_snapshots_given_by_name(tables: DictTables) -> None:
    assert {n: c.id for n, c in refs.branch_heads(tables).items()} == {"main": C3, "side": D3}
    assert {n: c.id for n, c in refs.snapshot_commits(tables).items()} == {"best": C1}


# Naming in one way


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, C3),
        ({"ref": "best"}, C1),
        ({"branch": "side"}, D3),
        ({"snapshot": "best"}, C1),
        ({"step": 2}, C2),
        ({"commit": C2}, C2),
    ],
)
def test_is_a_commit_found_by_the_way_it_was_named(
    tables: DictTables, wanted: dict[str, Any], expected: str
) -> None:
    assert Wanted(**wanted).find(tables).id == expected


@pytest.mark.parametrize(
    "wanted",
    [
        {"branch": "best"},
        {"snapshot": "main"},
        {"commit": "main"},
        {"commit": C1[:8]},
        {"step": 7},
        {"ref": "nothing"},
    ],
)
def test_is_a_name_of_another_kind_not_taken(tables: DictTables, wanted: dict[str, Any]) -> None:
    with pytest.raises(NotFoundError):
        Wanted(**wanted).find(tables)


def test_are_two_names_at_once_refused() -> None:
    with pytest.raises(UsageError, match="not by branch and step"):
        Wanted(branch="main", step=3)


def test_is_a_branch_not_hidden_by_a_snapshot_of_its_name(tables: DictTables) -> None:
    applied([record("snapshot", name="main", commit=C1)], tables)
    assert Wanted(branch="main").find(tables).id == C3
    assert Wanted(snapshot="main").find(tables).id == C1


# New names


@pytest.mark.parametrize(
    ("name", "ref", "expected"),
    [
        ("good", None, C3),
        ("good", "step-1", C1),
        ("step-2", None, C2),
        ("step-2", C2, C2),
        ("step-3", "side", D3),
    ],
)
def test_does_a_snapshot_pin_what_its_name_or_ref_says(
    tables: DictTables, name: str, ref: str | None, expected: str
) -> None:
    assert refs.snapshot_target(tables, name, ref).id == expected


def test_does_a_snapshot_of_a_step_stay_what_it_was(tables: DictTables) -> None:
    """The same command again means the same commit, also when the step was trained again."""
    applied([record("snapshot", name="step-3", commit=C3)], tables)
    applied([record("rewind", branch="main", to=C2), commit("f" * 32, 3, C2, 7)], tables)
    assert refs.snapshot_target(tables, "step-3", None).id == C3


def test_is_a_snapshot_refused_whose_name_lies(tables: DictTables) -> None:
    with pytest.raises(UsageError, match="pins step 2, but 'main' is step 3"):
        refs.snapshot_target(tables, "step-2", "main")
    with pytest.raises(NotFoundError, match="retained steps"):
        refs.snapshot_target(tables, "step-9", None)


@pytest.mark.parametrize("name", [C1, C1.upper(), "ef" * 16])
def test_is_no_new_name_of_the_form_of_an_id(tables: DictTables, name: str) -> None:
    for ref in (None, C1, C3):
        with pytest.raises(UsageError, match="has the form of a commit id"):
            refs.snapshot_target(tables, name, ref)
    with pytest.raises(UsageError, match="has the form of a commit id"):
        refs.check_new_branch(tables, name)


def test_is_no_new_name_the_beginning_of_another_commits_id(tables: DictTables) -> None:
    with pytest.raises(UsageError, match=f"beginning of commit {C3} .step 3., which it would hide"):
        refs.snapshot_target(tables, "bbbb3", C1)
    with pytest.raises(UsageError, match="would hide"):
        refs.check_new_branch(tables, "AAAA")
    assert refs.snapshot_target(tables, "bbbb3", C3).id == C3, "its own may name it"
    assert refs.snapshot_target(tables, "cafe", C1).id == C1
    assert refs.check_new_branch(tables, "aaa") is None, "too short for an id"


def test_does_a_whole_id_mean_its_commit_whatever_has_its_name(tables: DictTables) -> None:
    """Earlier versions took such names; what says how to undo a rewind gives whole ids."""
    state.apply(tables, record("snapshot", name=C1, commit=C3))
    state.apply(tables, record("snapshot", name="aaaa1", commit=C3))
    assert refs.resolve(tables, C1).id == C1
    assert refs.resolve(tables, "aaaa1").id == C3, "a name goes before the beginning of an id"
    assert Wanted(snapshot=C1).find(tables).id == C3
    assert refs.resolve(tables, C1.upper()).id == C1


def test_is_a_branch_refused_that_would_hide_something(tables: DictTables) -> None:
    assert refs.check_new_branch(tables, "fresh") is None
    with pytest.raises(UsageError, match="mean steps"):
        refs.check_new_branch(tables, "step-7")
    with pytest.raises(ConflictError, match="is a snapshot"):
        refs.check_new_branch(tables, "best")


def test_is_a_long_list_of_names_cut_short() -> None:
    names = [f"name-{number}" for number in range(50)]
    assert refs.no_such("shard", "zzz", names).count("name-") == refs.SHOWN_MAX
    assert state.DEFAULT_BRANCH == "main"
