"""Does `log` show what is asked for, as a table, a plot and a document?"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

import shardb
from shardb.branching import create_branch, rewind
from shardb.cli.log import _span
from shardb.errors import UsageError
from tests.support.commands import Ask, check_refused
from tests.support.small_stores import commit_step, tree


def lines(ask: Ask, *arguments: object) -> list[str]:
    answer = ask("log", *arguments)
    assert (answer.code, answer.err) == (0, "")
    return answer.out.splitlines()


def test_is_the_table_of_the_usual_columns(ask: Ask, root: Path) -> None:
    metrics = {
        "loss": 2.5,
        "validation_loss": 2.25,
        "learning_rate": 3e-4,
        "tokens_seen": 1_234_567,
    }
    with shardb.open(root, create=True) as store, store.begin() as txn:
        txn.write("p", {"w": np.zeros(1, dtype=np.float32)})
        txn.commit(step=7, metrics=metrics)
    headings, row = lines(ask, root)
    assert headings.split() == "step loss validation rate tokens bytes time notes".split()
    assert row.split()[:7] == ["7", "2.5000", "2.2500", "0.0003", "1,234,567", "4.1", "kB"]


def test_are_other_metrics_shown_and_unknown_ones_refused(ask: Ask, run: Path) -> None:
    assert lines(ask, run, "--metric", "loss")[0].split() == "step loss bytes time notes".split()
    told = ask("log", run, "--metric", "loss", "--limit", 1, "--json").json
    assert told[0]["metrics"] == {"loss": 1 / 7}
    check_refused(ask("log", run, "--metric", "los"), 4, "did you mean loss")


def test_are_since_and_limit_obeyed(ask: Ask, run: Path) -> None:
    assert [row["step"] for row in ask("log", run, "--since", 5, "--json").json] == [5, 6]
    assert [row["step"] for row in ask("log", run, "--since", "step-5", "--json").json] == [5, 6]
    assert len(ask("log", run, "--since", "1h", "--json").json) == 7
    assert ask("log", run, "--since", "2999-01-01", "--json").json == []
    assert "no commit there" in ask("log", run, "--since", 99).out
    check_refused(ask("log", run, "--since", "yesterday"), 2, "--since 'yesterday'")
    check_refused(ask("log", run, "--plot", "--json"), 2)


@pytest.mark.parametrize(
    ("text", "ago_seconds"), [("90s", 90), ("1.5m", 90), ("2h", 7200), ("1d", 86_400)]
)
def test_is_a_time_ago_read(text: str, ago_seconds: float) -> None:
    moment = _span(None, text).time
    assert moment == pytest.approx(time.time() - ago_seconds, abs=5)


def test_is_a_moment_read() -> None:
    begin = time.mktime((2026, 11, 29, 0, 0, 0, 0, 0, -1))
    assert _span(None, "2026-11-29").time == begin
    assert _span(None, "2026-11-29 14:30").time == begin + 14.5 * 3600
    assert _span(3, None).count == 3
    for bad in ("", "1y", "-5", "2026-13-01", "step-"):
        with pytest.raises(UsageError):
            _span(None, bad)


def test_does_a_plot_show_the_curve_and_what_happened(ask: Ask, run: Path) -> None:
    with shardb.open(run) as store:
        rewind(store, "main", "step-5")
    drawn = lines(ask, run, "--plot")
    assert "loss" in drawn[0]
    assert any(chr(0x2800) < character <= chr(0x28FF) for character in "".join(drawn))
    assert drawn[-1].startswith("steps 0 to 6; r rewound; s snapshot; not drawn: 1 left behind")
    assert "r" in drawn[-3]
    assert "s" in drawn[-3]
    assert lines(ask, run, "--plot", "--metric", "loss")[0].strip() == "line loss"


def test_does_a_plot_of_two_branches_tell_every_step_and_both(ask: Ask, run: Path) -> None:
    with shardb.open(run) as store:
        create_branch(store, "retry", "main")
        last = store.resolve("main").step
        commit_step(store, last + 5, branch="retry")
        commit_step(store, last + 1)
    drawn = lines(ask, run, "--plot")
    assert drawn[-1].startswith(f"steps 0 to {last + 5}; ")
    assert drawn[-1].endswith("the points of branches main, retry are in one curve")


def test_is_nothing_to_draw_told(ask: Ask, root: Path) -> None:
    with shardb.open(root, create=True) as store, store.begin() as txn:
        txn.write("p", {"w": np.zeros(1, dtype=np.float32)})
        txn.commit(step=1, metrics={"note": "text", "loss": float("nan")})
    assert lines(ask, root, "--plot") == ["no number to draw of loss"]
    assert lines(ask, root, "--plot", "--metric", "note") == ["no number to draw of note"]
    assert "note" in lines(ask, root, "--metric", "note")[0]


def test_is_the_store_only_read(ask: Ask, run: Path) -> None:
    before = tree(run)
    for more in ([], ["--plot"], ["--json"], ["--limit", "2"], ["--since", "1h"]):
        assert ask("log", run, *more).code == 0
    assert tree(run) == before
