"""Does `python -m tools.crash` count, and fail when a state was not recovered?"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from shardb.testing.counts import Counts, Violation
from shardb.testing.explorer import ExploreLimits
from shardb.testing.images import ImageLimits
from tools import crash, crash_campaign
from tools.crash_campaign import Campaign, Explorer, Task, plan

SPARSE = ExploreLimits(
    images=ImageLimits(
        exhaustive_operations=0,
        random_subsets=0,
        single_operations=0,
        torn_writes=0,
        every_index=False,
    ),
    recovery_every=10_000,
    kill_every=10_000,
    go_on_every=10_000,
    audit_every=100,
)


def _run(monkeypatch: pytest.MonkeyPatch, scratch: str, *words: str) -> int:
    command = ["crash", "--scratch", scratch, "--workload", "threads", "--effort", "quick"]
    monkeypatch.setattr("sys.argv", [*command, *words])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(crash, "EFFORTS", {"quick": SPARSE})
    return crash.main()


def test_it_prints_the_counts_and_leaves_nothing(
    scratch: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(monkeypatch, scratch, "--json", "--seed", "4") == 0
    counts = json.loads(capsys.readouterr().out)["threads, seed 4"]
    assert counts["states"] > 100
    assert counts["violations"] == []
    assert os.listdir(scratch) == []


def test_a_violation_is_an_exit_code_and_a_command(
    scratch: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    violation = Violation(
        seed=0,
        point=7,
        operation="7 sync",
        image="all",
        index="current",
        recovery="",
        reason="lost",
    )
    monkeypatch.setattr(crash, "explore", lambda *_, **__: Counts(violations=[violation]))
    assert _run(monkeypatch, scratch) == 1
    printed = capsys.readouterr().out
    assert "lost" in printed
    assert "python -m tools.crash --workload threads --seed 0 --effort quick" in printed


def test_a_sequence_of_verbs_is_explored_alone(
    scratch: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["crash", "--scratch", scratch, "--sequence", "rm,snapshot", "--images", "1"]
    monkeypatch.setattr("sys.argv", command)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert crash.main() == 0
    assert "rm,snapshot: " in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", [*command[:4], "rm,fly"])
    assert crash.main() == 2


def test_a_plan_has_every_sequence_of_up_to_three_verbs() -> None:
    verbs = len(crash_campaign.ALL_VERBS)
    tasks = plan(0)
    assert len({task.name for task in tasks}) == len(tasks)
    assert [len(t.verbs) for t in tasks].count(3) == verbs**3
    assert [len(t.verbs) for t in tasks].count(2) == verbs**2


class _Stopped(Exception):
    """The campaign is interrupted here."""


def _told(task: Task, budget: int) -> dict[str, Any]:
    return {
        **Counts(states=budget + 1, operations=3).to_json(),
        "task": task.name,
        "group": task.group,
        "again": "",
        "seconds": 0.5,
    }


def test_an_interrupted_campaign_goes_on(
    scratch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def explore(_: Explorer, task: Task, budget: int) -> dict[str, Any]:
        if len(done) == 150:
            raise _Stopped
        done.append(task.name)
        return _told(task, budget)

    monkeypatch.setattr(Explorer, "explore", explore)
    file = tmp_path / "campaign.jsonl"
    with pytest.raises(_Stopped):
        list(Campaign(file, seed=3, states=50_000).run(Explorer(scratch, 3), lambda _: None))
    again = Campaign(file, seed=3, states=50_000)
    assert len(again.results) == 150
    monkeypatch.setattr(Explorer, "explore", lambda _, task, budget: _told(task, budget))
    rest = [task.name for task in again.run(Explorer(scratch, 3), lambda _: None)]
    assert not set(rest) & set(done)
    assert len(rest) + len(done) == len(plan(3))
    assert again.states >= 50_000, "the budgets come to what was asked for"
    assert again.sums()["all"].tasks == len(plan(3))
    assert not Campaign(file, seed=4, states=50_000).results, "another campaign begins anew"
