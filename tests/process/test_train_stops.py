"""What do signals, a second writer and a lost reader leave behind?"""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import pytest

import shardb
from shardb import branching
from shardb.filesystem import RealFileSystem
from tests.support.training import (
    TrainProcess,
    arguments,
    head_step,
    make_data,
    step_lines,
    step_records,
    train_here,
)

# So many micro-batches that a step takes a second or two: time to do something inside it.
LONG_STEP = ("--gradient-accumulation-steps", "400")
ENDLESS = ("--max-steps", "100000")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"]
)
def test_a_signal_lets_the_step_commit(
    data: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    store = tmp_path / "run"
    with TrainProcess(arguments(store, data, *LONG_STEP, *ENDLESS)) as train:
        train.wait_for_step(1)
        # Well inside the second step, which has to be finished.
        time.sleep(0.3)
        train.send(number)
        ended, out, err = train.finish()
    assert ended == code, err
    last = head_step(store)
    assert last >= 2
    assert f"step={last} " in out
    assert [line["step"] for line in step_lines(store)] == list(range(1, last + 1))
    assert f"step {last} is committed" in err
    assert "Traceback" not in err


def test_a_second_interrupt_stops_at_once_at_the_last_commit(data: Path, tmp_path: Path) -> None:
    store = tmp_path / "run"
    long = ("--gradient-accumulation-steps", "20000")
    with TrainProcess(arguments(store, data, *long, *ENDLESS)) as train:
        deadline = time.monotonic() + 60
        while not (store / "logs" / "steps.jsonl").exists():
            assert time.monotonic() < deadline, "the run did not begin"
            time.sleep(0.05)
        time.sleep(0.5)
        train.send(signal.SIGINT)
        time.sleep(0.5)
        assert train.process.poll() is None, "the first interrupt waits for the step"
        sent = time.monotonic()
        train.send(signal.SIGINT)
        code, _, err = train.finish()
        waited = time.monotonic() - sent
    assert code == 130
    assert waited < 10, "the step would have taken far longer"
    assert "at its last commit" in err
    assert head_step(store) == 0
    with shardb.open(store) as opened, opened.at() as view:
        assert view.read("params/block_000").array("mlp.up_proj.weight").shape == (48, 32)


def test_a_second_writer_is_refused_by_host_and_process(data: Path, tmp_path: Path) -> None:
    store = tmp_path / "run"
    with TrainProcess(arguments(store, data, *ENDLESS)) as first:
        first.wait_for_step(2)
        with TrainProcess(arguments(store)) as second:
            code, out, err = second.finish()
        assert code == 5
        assert str(first.pid) in err
        assert socket.gethostname() in err
        assert "since 20" in err
        assert "step=" not in out
        assert err.count("error:") == 1
        # The first one has not noticed anything.
        first.wait_for_step(int(step_lines(store)[-1]["step"]) + 1)
        first.send(signal.SIGTERM)
        assert first.finish()[0] == 143
    # Control: once the first has gone, the same command is let in.
    assert train_here(arguments(store, None, "--max-steps", str(head_step(store) + 1))) == 0


def is_committed(store: shardb.Store, step: int) -> bool:
    return store.resolve().step >= step and (store.durable_step() or 0) >= step


def durable_after(step: int, store: shardb.Store | Path) -> int:
    """Give what a line has to call durable after a step: on a RAM disk no step survives."""
    root = store.root if isinstance(store, shardb.Store) else str(store)
    return 0 if RealFileSystem().kind(root).startswith("memory:") else step


def test_a_line_is_printed_only_after_its_commit(data: Path, tmp_path: Path) -> None:
    store = tmp_path / "run"
    with TrainProcess(arguments(store, data, "--max-steps", "40")) as train:
        lines = train.lines()
        first = next(lines)
        assert first.startswith("step=1 loss=")
        with shardb.open(store) as opened:
            for line in lines:
                step = int(line.split()[0].removeprefix("step="))
                durable = int(line.split()[2].removeprefix("durable="))
                assert durable == durable_after(step, opened)
                assert is_committed(opened, step), line
            # Control: a line ahead of its commit would have been noticed.
            assert not is_committed(opened, 41)
        assert train.finish()[0] == 0


def test_a_reader_that_goes_away_does_not_end_the_run(data: Path, tmp_path: Path) -> None:
    store = tmp_path / "run"
    with TrainProcess(arguments(store, data, "--max-steps", "30")) as train:
        train.wait_for_step(1)
        assert train.process.stdout is not None
        train.process.stdout.close()
        assert train.process.wait(timeout=60) == 0
    assert head_step(store) == 30


def test_the_step_log_is_cut_and_filled_on_resume(data: Path, tmp_path: Path) -> None:
    store = tmp_path / "run"
    log = store / "logs" / "steps.jsonl"
    assert train_here(arguments(store, data, "--max-steps", "6")) == 0
    whole = log.read_bytes().splitlines(keepends=True)
    # Lines of steps that never were, and one that a power cut tore.
    log.write_bytes(b"".join(whole) + b'{"step": 7}\n{"step": 8}\n{"step": 9, "lo')
    assert train_here(arguments(store, None, "--max-steps", "8")) == 0
    # Lines that were lost with the power: the commits still know them.
    log.write_bytes(b"".join(whole[:2]) + whole[2][:9])
    assert train_here(arguments(store, None, "--max-steps", "9")) == 0
    lines = step_lines(store)
    assert [line["step"] for line in lines] == list(range(1, 10))
    records = step_records(store)
    for line in lines:
        assert line["loss"] == records[line["step"]].loss
        assert line["durable_step"] == durable_after(line["step"], store)
    assert lines[2]["rebuilt"] is True
    assert "rebuilt" not in lines[1]


def test_a_finished_run_says_so(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "run"
    args = arguments(store, data, "--max-steps", "2")
    assert train_here(args) == 0
    before = step_records(store)
    capsys.readouterr()
    assert train_here(args) == 0
    assert "has 2 steps already" in capsys.readouterr().out
    assert train_here(arguments(store)) == 0
    assert "has 2 steps already" in capsys.readouterr().out
    assert step_records(store) == before


def test_a_run_that_was_rewound_trains_the_same_steps_again(data: Path, tmp_path: Path) -> None:
    store = tmp_path / "run"
    assert train_here(arguments(store, data, "--max-steps", "3", "--snapshot-every", "3")) == 0
    assert train_here(arguments(store, None, "--max-steps", "6", "--snapshot-every", "0")) == 0
    before = step_lines(store)
    with shardb.open(store) as opened:
        last = opened.resolve().shards
        branching.rewind(opened, "main", "step-3")
    assert train_here(arguments(store, None, "--max-steps", "6")) == 0
    after = step_lines(store)
    assert [line["step"] for line in after] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in after] == [line["loss"] for line in before]
    with shardb.open(store) as opened:
        assert opened.resolve().shards == last
