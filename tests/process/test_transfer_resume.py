"""Does training go on from a copy as it does from the original, bit for bit?"""

from __future__ import annotations

from pathlib import Path

import shardb
from tests.support.commands import Ask
from tests.support.store_workers import commit_steps, started
from tests.support.training import arguments, make_data, step_records, train_here
from tests.support.transfer_kill import check_clean

STOP, END = 3, 6


def test_does_a_pulled_run_repeat_every_step(tmp_path: Path, ask: Ask) -> None:
    data = make_data(tmp_path / "data")
    ours, fresh, place = tmp_path / "run", tmp_path / "fresh", (tmp_path / "place").as_uri()
    assert train_here(arguments(ours, data, "--max-steps", str(STOP))) == 0
    assert ask("push", ours, place).code == 0
    assert ask("pull", fresh, place).code == 0
    assert [row["step"] for row in ask("log", fresh, "--json").json] == list(range(STOP + 1))
    for store in (ours, fresh):
        assert train_here([*arguments(store), "--max-steps", str(END)]) == 0
    expected, found = step_records(ours), step_records(fresh)
    assert set(found) == set(range(STOP, END + 1))
    for step, record in found.items():
        assert record == expected[step]


def test_would_a_difference_be_noticed(tmp_path: Path, ask: Ask) -> None:
    """The control arm: the copy is of the step before, and called the same."""
    data = make_data(tmp_path / "data")
    ours, fresh = tmp_path / "run", tmp_path / "fresh"
    assert train_here(arguments(ours, data, "--max-steps", str(STOP))) == 0
    with shardb.open(ours) as source, shardb.open(fresh, create=True) as target:
        head = source.resolve()
        with source.at() as view, target.begin() as transaction:
            for name in view.names():
                arrays = {n: a.copy() for n, a in view.read(name).arrays().items()}
                if name.startswith("optim/"):
                    next(iter(arrays.values()))[...] = 0
                trainable = head.shards[name].trainable
                transaction.write(name, arrays, trainable=trainable)
            transaction.commit(
                step=head.step,
                state=head.state,
                metrics=head.metrics,
                recipe_digest=head.recipe,
            )
    for store in (ours, fresh):
        assert train_here([*arguments(store), "--max-steps", str(STOP + 1)]) == 0
    assert step_records(fresh)[STOP + 1] != step_records(ours)[STOP + 1]


def test_are_copies_beside_a_live_writer_whole(tmp_path: Path, ask: Ask) -> None:
    """What `cp -r` cannot do: each copy is one commit, complete, and every later one goes on."""
    run, copy, place = tmp_path / "run", tmp_path / "copy", (tmp_path / "place").as_uri()
    with shardb.open(run, create=True):
        pass
    steps = []
    with started(commit_steps, run) as worker:
        worker.line()
        for _ in range(4):
            steps.append(ask("push", run, copy, "--json").json["step"])
            assert ask("push", run, place).code == 0
            while int(worker.line()) <= steps[-1]:
                pass  # until the writer has gone on
        assert ask("clone", run, tmp_path / "clone").code == 0
        worker.kill()
    assert steps == sorted(set(steps))
    for root in (run, copy, tmp_path / "clone"):
        check_clean(root)
    told = [row["step"] for row in ask("log", copy, "--json").json]
    assert told == list(range(told[0], steps[-1] + 1))
    assert ask("pull", tmp_path / "pulled", place).code == 0
