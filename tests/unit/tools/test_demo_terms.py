"""Does the demo touch only its own folder, and fit the time?"""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.demo_terms import DemoError, Folder, Plan, planned


def folder(tmp_path: Path) -> Folder:
    return Folder(root=tmp_path / "demo-run")


def test_does_a_second_demo_go_on_with_the_first(tmp_path: Path) -> None:
    first, known = folder(tmp_path).open("plays", quick=False)
    assert not known
    folder(tmp_path).write_plan(planned(first, 0.5))
    second, known = folder(tmp_path).open("plays", quick=False)
    assert known
    assert (second.steps, second.kill_step) == (320, 163)


def test_is_a_folder_of_somebody_else_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "demo-run" / "thesis.txt"
    foreign.parent.mkdir()
    foreign.write_text("years of work")
    with pytest.raises(DemoError, match="not made by this demo"):
        folder(tmp_path).open("plays", quick=False)
    with pytest.raises(DemoError, match="not made by this demo"):
        folder(tmp_path).clean()
    assert foreign.read_text() == "years of work"


def test_is_a_model_of_another_text_kept(tmp_path: Path) -> None:
    folder(tmp_path).open("plays", quick=False)
    with pytest.raises(DemoError, match="make demo-clean"):
        folder(tmp_path).open("other.txt", quick=False)


def test_does_clean_delete_only_what_the_demo_made(tmp_path: Path) -> None:
    mine = folder(tmp_path)
    mine.open("plays", quick=False)
    mine.run.mkdir()
    (mine.run / "FORMAT").write_text("x")
    (mine.root / "notes.txt").write_text("mine")
    assert mine.clean() == ["notes.txt"]
    assert (mine.root / "notes.txt").read_text() == "mine"
    assert not mine.run.exists()


def test_does_clean_remove_the_folder_and_run_twice(tmp_path: Path) -> None:
    mine = folder(tmp_path)
    mine.open("plays", quick=False)
    assert mine.clean() == []
    assert not mine.root.exists()
    assert mine.clean() == []


def test_does_clean_not_follow_a_link(tmp_path: Path) -> None:
    mine = folder(tmp_path)
    mine.open("plays", quick=False)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    mine.data.symlink_to(elsewhere)
    mine.clean()
    assert (elsewhere / "kept").exists()


@pytest.mark.parametrize("text", ["", "{", '{"steps": 3, "unknown": 1}'])
def test_is_a_broken_marker_told(tmp_path: Path, text: str) -> None:
    mine = folder(tmp_path)
    mine.root.mkdir()
    mine.marker.write_text(text)
    with pytest.raises(DemoError, match=r"DEMO\.json"):
        mine.read_plan()


@pytest.mark.parametrize(
    ("seconds_a_step", "steps"), [(0.001, 2000), (0.5, 320), (1.0, 160), (60.0, 80)]
)
def test_do_the_steps_fit_the_time(seconds_a_step: float, steps: int) -> None:
    plan = planned(Plan(text="plays", quick=False), seconds_a_step)
    assert (plan.steps, plan.kill_step) == (steps, steps // 2 + 3)
