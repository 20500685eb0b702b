"""What do a kill, a power cut and a signal leave of a run in an active store?"""

from __future__ import annotations

import random
import shutil
import signal
import time
from pathlib import Path

import pytest

import shardb
from shardb.filesystem import RealFileSystem
from tests.support.active_runs import log_rows
from tests.support.training import (
    StepRecord,
    TrainProcess,
    arguments,
    make_data,
    step_lines,
    step_records,
    train_here,
)

STEPS = 24
SCHEDULE = ("--lr-schedule", "cosine", "--warmup-tokens", "512", "--decay-tokens", "1024")
ENDLESS = ("--max-steps", "100000")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def straight(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, StepRecord]:
    """Train in one store without a stop."""
    store = tmp_path_factory.mktemp("straight") / "run"
    assert train_here(arguments(store, data, *SCHEDULE, "--max-steps", str(STEPS))) == 0
    return step_records(store)


def head_step(store: Path) -> int:
    with shardb.open(store) as opened:
        head = opened.branches().get("main")
        return -1 if head is None else head.step


def test_killed_and_cut_off_at_random_equals_straight(
    data: Path, straight: dict[int, StepRecord], tmp_path: Path, active: Path
) -> None:
    """SIGKILL twice; after the second one the power goes, and the RAM disk with it."""
    seed = int(time.time())
    print(f"moments of random seed {seed}")
    source = random.Random(seed)
    store = tmp_path / "run"
    active_flags = ("--active", str(active), "--durable-every", "3", "--save-every", "5")
    args = arguments(store, data, *SCHEDULE, *active_flags, "--max-steps", str(STEPS))
    for number, (low, high) in enumerate(((3, 9), (12, 19))):
        with TrainProcess(args) as train:
            line = train.wait_for_step(source.randint(low, high))
            time.sleep(source.random() * 0.02)
            train.send(signal.SIGKILL)
            train.finish()
        told = {key: int(value) for key, value in (p.split("=") for p in line.split()[:3:2])}
        # What was said to be durable is, and what was said to be committed is there after a kill.
        assert head_step(active) >= told["step"]
        durable_step = head_step(store)
        if not RealFileSystem().kind(str(tmp_path)).startswith("memory:"):
            assert durable_step >= told["durable"]
        if number == 1:
            shutil.rmtree(active)
        args = arguments(store)
    with TrainProcess(args) as train:
        code, _, err = train.finish()
    assert code == 0, err
    with shardb.open(store) as opened:
        digests = {name: entry.digest for name, entry in opened.resolve().shards.items()}
        pinned = {name: commit.step for name, commit in opened.snapshots().items()}
    assert digests == straight[STEPS].shards
    assert pinned == {f"step-{step}": step for step in range(5, STEPS, 5)}
    rows = log_rows(store)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    losses = [(row["step"], row["metrics"]["loss"]) for row in rows if row["step"]]
    assert losses == [(step, straight[step].loss) for step in range(1, STEPS + 1)]
    assert [line["step"] for line in step_lines(store)] == list(range(1, STEPS + 1))


def test_control_another_recipe_is_noticed(
    data: Path, straight: dict[int, StepRecord], tmp_path: Path, active: Path
) -> None:
    store = tmp_path / "run"
    args = arguments(store, data, *SCHEDULE, "--active", str(active), "--max-steps")
    assert train_here([*args, "3"]) == 0
    assert train_here([*args, "4", "--learning-rate", "0.0029"]) == 0
    with shardb.open(store) as opened:
        digests = {name: entry.digest for name, entry in opened.resolve().shards.items()}
    assert digests.keys() == straight[4].shards.keys()
    assert digests["params/block_000"] != straight[4].shards["params/block_000"]


def test_a_signal_publishes_the_last_step_before_the_end(
    data: Path, tmp_path: Path, active: Path
) -> None:
    store = tmp_path / "run"
    with TrainProcess(arguments(store, data, *ENDLESS, "--active", str(active))) as train:
        train.wait_for_step(3)
        assert head_step(store) == 0
        train.send(signal.SIGTERM)
        ended, _, err = train.finish()
    assert ended == 143, err
    assert head_step(store) == head_step(active) >= 3
    assert "Traceback" not in err


def test_a_second_writer_is_refused_whichever_store_it_comes_by(
    data: Path, tmp_path: Path, active: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, other = tmp_path / "run", tmp_path / "other"
    assert train_here(arguments(other, data, "--max-steps", "1")) == 0
    refused = {
        "the durable store": arguments(store, None, "--active", "off"),
        "both stores": arguments(store),
        "the active store": arguments(other, None, "--active", str(active)),
    }
    with TrainProcess(arguments(store, data, *ENDLESS, "--active", str(active))) as first:
        first.wait_for_step(2)
        for way, args in refused.items():
            capsys.readouterr()
            assert train_here(args) == 5, way
            out, err = capsys.readouterr()
            assert "step=" not in out
            expected = "another run" if way == "the active store" else str(first.pid)
            assert expected in err, way
        first.send(signal.SIGTERM)
        assert first.finish()[0] == 143
    assert head_step(other) == 1
