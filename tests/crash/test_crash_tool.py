"""Does `python -m tools.crash` count, and fail when a state was not recovered?"""

from __future__ import annotations

import json
import os

import pytest

from shardb.testing.explorer import Counts, ExploreLimits, Violation
from shardb.testing.images import ImageLimits
from tools import crash

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
