"""Does a dry run fail as the run itself would where a budget does not hold, and name each one?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.training import arguments, make_data, train_here
from trainer import budget as budgets
from trainer.preflight import BudgetLine, refusals
from trainer.recipe import Settings

SMALL_BYTES = 1 << 20


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    data = make_data(tmp_path / "data", rows=40)
    return arguments(tmp_path / "run", data, "--max-steps", "2")


def take_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "machine_memory", lambda: (SMALL_BYTES, SMALL_BYTES))


def take_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "_free_bytes", lambda _: SMALL_BYTES)


@pytest.mark.parametrize(
    ("take", "code", "name", "more"),
    [
        (take_memory, 2, "host memory", ()),
        (take_disk, 6, "disk space", ()),
        (take_disk, 6, "active store's disk, disk space", ("--active", "{run}-active")),
    ],
)
def test_a_budget_that_does_not_hold_is_named_with_the_code_of_the_run(
    take: Callable[[pytest.MonkeyPatch], None],
    code: int,
    name: str,
    more: tuple[str, ...],
    flags: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("trainer.preflight.is_ram_disk", lambda _: False)
    flags += [part.format(run=flags[1]) for part in more]
    # The control: on this machine all of them hold.
    assert train_here([*flags, "--dry-run"]) == 0
    assert "does not hold" not in capsys.readouterr().out
    take(monkeypatch)
    assert train_here([*flags, "--dry-run"]) == code
    told = capsys.readouterr()
    assert f"does not hold: {name}\n" in told.out
    assert train_here(flags) == code
    assert capsys.readouterr() == ("", told.err)
    assert not Path(flags[1]).exists()


def test_every_broken_budget_is_in_the_json_and_the_first_decides_the_code(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_here([*flags, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["refused"] == {}
    take_memory(monkeypatch)
    take_disk(monkeypatch)
    assert train_here([*flags, "--dry-run", "--json"]) == 6
    told = capsys.readouterr()
    refused = json.loads(told.out)["refused"]
    assert [*refused] == ["disk space", "host memory"]
    assert "--micro-batch-size" in refused["host memory"]
    assert refused["disk space"] in told.err


def test_a_device_that_is_too_small_is_among_them(tmp_path: Path) -> None:
    budget = budgets.Budget(parameter_count=1, shards={"params/a": 1}, snapshots=0, memory={"a": 1})
    for needed, names in ((9, []), (11, ["device memory"])):
        line = BudgetLine(
            name="device memory", needed=needed, available=10, text="of ten", remedy="--flag"
        )
        found = refusals([line], Settings(data_dir="rows", max_steps=1), budget, tmp_path / "run")
        assert [*found] == names
        assert all(error.exit_code == 2 for error in found.values())
