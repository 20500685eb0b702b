"""Does a run in fp16 skip what overflows, count it, stop in the end, and decide the same again?"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardb
from tests.support.training import (
    TrainProcess,
    arguments,
    make_data,
    step_lines,
    step_records,
    train_here,
)

# The first scale overflows a few times, and growing every second step makes it overflow again.
FP16 = ["--dtype", "fp16", "--loss-scale", str(2**22), "--loss-scale-growth-steps", "2"]
STEPS = ["--max-steps", "6"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_data(tmp_path / "data", rows=60)


def state_of_head(store: Path) -> dict[str, Any]:
    with shardb.open(store) as opened:
        return dict(opened.resolve().state)


def test_skips_are_counted_and_the_scale_travels_with_the_commit(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "run"
    assert train_here(arguments(store, data, *FP16, *STEPS)) == 0
    said = capsys.readouterr().err
    lines = step_lines(store)
    skipped = lines[-1]["skipped_steps"]
    assert skipped >= 2
    assert said.count("overflowed at loss scale") == skipped
    assert lines[-1]["skip_rate"] == skipped / (6 + skipped)
    assert lines[0]["skipped"][0]["reason"] == "gradient_overflow"
    assert lines[0]["skipped"][0]["position"] == 0
    state = state_of_head(store)
    assert state["position"] == 4 * (6 + skipped), "a skipped batch is consumed"
    assert state["tokens_seen"] == 6 * 4 * 16, "and not trained on"
    assert state["skipped_steps"] == skipped
    assert set(state["scaler"]) == {"scale", "good_steps"}
    assert np.isfinite([line["loss"] for line in lines]).all()


@pytest.mark.parametrize("kill_after", ["first skip", "a step"])
def test_a_kill_repeats_the_same_decisions(data: Path, tmp_path: Path, kill_after: str) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train_here(arguments(whole, data, *FP16, *STEPS)) == 0
    with TrainProcess(arguments(killed, data, *FP16, *STEPS)) as process:
        if kill_after == "a step":
            process.wait_for_step(3)
        else:
            assert process.process.stderr is not None
            assert any("overflowed at loss scale" in line for line in process.process.stderr)
        process.send(signal.SIGKILL)
    assert train_here(arguments(killed)) == 0
    assert step_records(killed) == step_records(whole)
    states = [state_of_head(store) for store in (whole, killed)]
    assert states[0] == states[1]


def test_a_true_nan_stops_at_once_and_is_named(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "run"
    fp16 = ["--dtype", "fp16", "--max-steps", "1"]
    assert train_here(arguments(store, data, *fp16)) == 0
    with shardb.open(store) as opened, opened.begin() as txn:
        for name in txn.names():
            view = txn.read(name)
            if name.startswith("meta/"):
                continue
            arrays = {tensor: array.copy() for tensor, array in view.arrays().items()}
            if name == "params/block_001":
                arrays["mlp.down_proj.weight"][0, 0] = np.nan
            txn.write(name, arrays)
        assert txn.base is not None
        txn.commit(step=2, state=txn.base.state, metrics={}, recipe_digest=txn.base.recipe)
    capsys.readouterr()
    assert train_here(arguments(store, None, "--max-steps", "4")) == 2
    said = capsys.readouterr().err
    assert "the first values that are not finite leave block_001" in said
    assert "In fp32, without a loss scale, too" in said
    assert max(step_records(store)) == 2


def test_the_limit_of_skips_says_that_fp32_would_do(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "run"
    flags = ["--dtype", "fp16", "--loss-scale", str(2**24), "--max-skipped-steps", "2"]
    assert train_here(arguments(store, data, *flags, *STEPS)) == 2
    said = capsys.readouterr().err
    assert "2 batches in a row were skipped (2 gradient_overflow)" in said
    assert "the gradient of params/" in said
    assert "In fp32 the same batch has finite gradients" in said
    assert max(step_records(store)) == 0
