"""Is a run that was killed the run that was never killed, bit for bit?"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.training import (
    StepRecord,
    TrainProcess,
    arguments,
    head_step,
    make_data,
    step_lines,
    step_records,
    train_here,
)
from trainer.run_shards import Cursor

STEPS = 10
SCHEDULE = (
    *("--gradient-accumulation-steps", "2", "--lr-schedule", "cosine"),
    *("--warmup-tokens", "512", "--decay-tokens", "1024", "--validate-every", "4"),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def straight(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, StepRecord]:
    """Train ten steps without a stop, in a process of their own."""
    store = tmp_path_factory.mktemp("straight") / "run"
    args = arguments(store, data, *SCHEDULE, "--max-steps", str(STEPS))
    with TrainProcess(args, is_fresh=True) as train:
        code, _, err = train.finish()
    assert code == 0, err
    return step_records(store)


def kill_moments(source: random.Random) -> Iterator[tuple[int, float]]:
    """Give the step after which to kill, and the delay after its line, four times."""
    for low, high in ((1, 2), (3, 5), (6, 7), (8, 9)):
        yield source.randint(low, high), source.random() * 0.02


def test_killed_at_random_moments_and_resumed_equals_straight(
    data: Path, straight: dict[int, StepRecord], tmp_path: Path
) -> None:
    seed = int(time.time())
    print(f"moments of random seed {seed}")
    store = tmp_path / "run"
    args = arguments(store, data, *SCHEDULE, "--max-steps", str(STEPS))
    for step, delay in kill_moments(random.Random(seed)):
        with TrainProcess(args) as train:
            if head_before(store) < step:
                train.wait_for_step(step)
            time.sleep(delay)
            train.send(signal.SIGKILL)
            train.finish()
        # The second and later starts resume with nothing but the store.
        args = arguments(store)
    with TrainProcess(args) as train:
        code, _, err = train.finish()
    assert code == 0, err
    assert sorted(straight) == list(range(STEPS + 1))
    assert step_records(store) == straight
    assert [line["step"] for line in step_lines(store)] == list(range(1, STEPS + 1))


def head_before(store: Path) -> int:
    return head_step(store) if store.exists() else -1


def test_ten_steps_and_then_twenty_equal_twenty_straight(data: Path, tmp_path: Path) -> None:
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    for stop in ("10", "20"):
        assert train_here(arguments(parts, data, *SCHEDULE, "--max-steps", stop)) == 0
    assert train_here(arguments(whole, data, *SCHEDULE, "--max-steps", "20")) == 0
    records = step_records(parts)
    assert records == step_records(whole)
    rates = [records[step].learning_rate for step in range(1, 21)]
    assert rates[3] == max(rates) == 0.003
    assert len(set(rates[3:12])) == 9
    assert rates[-1] == pytest.approx(0.0003)


def test_in_process_and_in_its_own_process_agree(
    data: Path, straight: dict[int, StepRecord], tmp_path: Path
) -> None:
    store = tmp_path / "run"
    assert train_here(arguments(store, data, *SCHEDULE, "--max-steps", "4")) == 0
    assert step_records(store) == {step: straight[step] for step in range(5)}


# Control arms: the comparison above must notice a resume that is wrong in a small way.


def test_control_one_row_skipped_on_resume_is_noticed(
    data: Path,
    straight: dict[int, StepRecord],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = tmp_path / "run"
    assert train_here(arguments(store, data, *SCHEDULE, "--max-steps", "5")) == 0
    true_cursor = Cursor.of

    def advanced(commit: object) -> Cursor:
        cursor = true_cursor(commit)  # type: ignore[arg-type]
        return Cursor(position=cursor.position + 1, tokens_seen=cursor.tokens_seen)

    monkeypatch.setattr(Cursor, "of", advanced)
    assert train_here(arguments(store, None, "--max-steps", "6")) == 0
    records = step_records(store)
    assert {step: records[step] for step in range(6)} == {s: straight[s] for s in range(6)}
    assert records[6].batch_digest != straight[6].batch_digest
    assert records[6].shards["params/block_000"] != straight[6].shards["params/block_000"]


def test_control_another_seed_is_noticed(
    data: Path, straight: dict[int, StepRecord], tmp_path: Path
) -> None:
    store = tmp_path / "run"
    args = [*arguments(store, data, *SCHEDULE, "--max-steps", "1"), "--seed", "8"]
    assert train_here(args) == 0
    records = step_records(store)
    assert records[0].shards["params/block_000"] != straight[0].shards["params/block_000"]
    assert records[1].batch_digest != straight[1].batch_digest


def test_control_a_learning_rate_one_bit_off_is_noticed(
    data: Path, straight: dict[int, StepRecord], tmp_path: Path
) -> None:
    store = tmp_path / "run"
    args = [*arguments(store, data, *SCHEDULE, "--max-steps", "1")]
    args[args.index("0.003")] = "0.0030000000000000005"
    assert train_here(args) == 0
    records = step_records(store)
    assert records[1].batch_digest == straight[1].batch_digest
    assert records[1] != straight[1]
