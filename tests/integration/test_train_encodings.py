"""Does a run with smaller shards know their sizes beforehand, and repeat itself after a kill?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shardb
from tests.support.training import arguments, make_data, step_records, train_here

SMALL = ["--optimizer-state-dtype", "int8", "--master-weight-dtype", "bf16"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_data(tmp_path / "data", rows=40)


def test_a_dry_run_tells_the_exact_sizes(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments(tmp_path / "run", data, "--max-steps", "1", *SMALL)
    assert train_here([*args, "--dry-run", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert train_here(args) == 0
    with shardb.open(tmp_path / "run") as opened:
        shards = opened.resolve().shards
    assert report["shards"] == {n: e.bytes for n, e in shards.items() if e.trainable}


def test_a_resumed_run_rounds_and_encodes_as_one_never_stopped(data: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train_here(arguments(whole, data, "--max-steps", "4", *SMALL)) == 0
    assert train_here(arguments(parts, data, "--max-steps", "2", *SMALL)) == 0
    assert train_here(arguments(parts, None, "--max-steps", "4")) == 0
    assert step_records(parts) == step_records(whole)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--optimizer", "lion", *SMALL[:2]], "it is for adamw"),
        (["--optimizer-state-dtype", "fp8"], "choose from fp32, bf16, int8"),
    ],
)
def test_what_cannot_be_is_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    assert train_here(arguments(tmp_path / "run", data, "--max-steps", "1", *flags)) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_form_of_shards_may_not_change_on_resume(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "run"
    assert train_here(arguments(store, data, "--max-steps", "1")) == 0
    assert train_here(arguments(store, None, "--max-steps", "2", *SMALL[:2])) == 2
    assert "--optimizer-state-dtype int8 was given" in capsys.readouterr().err
