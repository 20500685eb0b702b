"""Does the guard keep a harmful step out of the store, and say what it did?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import shardb
from tests.support.tiny_model import TINY, micro_batches
from tests.support.training import arguments, make_data, step_lines, step_records, train_here
from trainer.device import Device
from trainer.engine import Engine, EngineOptions
from trainer.errors import UpdateRejectedError
from trainer.guard import Record, train_guarded

RATE = 2e-2
HARMFUL = 3
GUARD = {
    "guarded_step_replay": True,
    "guard_replay_on_exhaust": "skip",
    "guard_replay_lr_scales": (1.0, 0.9, 0.8),
}


def harmful_batches() -> list[np.ndarray]:
    """The batch of the harmful step with all its tokens, and so its labels, shuffled."""
    [rows] = micro_batches(HARMFUL, 1)
    return [np.random.default_rng(5).permuted(rows)]


Commits = list[dict[str, str]]


def commits_of(path: Path, *, is_guarded: bool, sees_it: bool) -> tuple[Commits, Record]:
    """Train four batches in a real store, the third made harmful; give every commit's digests."""
    options = EngineOptions(lm_head_chunk_tokens=16, **(GUARD if is_guarded else {}))
    engine = Engine(TINY, options, Device.from_name("cpu"))
    rejected: Record = {}
    with shardb.open(path, create=True) as store:
        with store.begin() as txn:
            engine.initialise(txn, 3)
            commits = [txn.commit(step=0)]
        for number in range(1, 5):
            if number == HARMFUL and not sees_it:
                continue
            is_harmful = number == HARMFUL
            batches = harmful_batches() if is_harmful else micro_batches(number, 1)
            rate = RATE * (100 if is_harmful else 1)
            try:
                with store.begin() as txn:
                    step = len(commits)
                    train_guarded(engine, txn, batches, step=step, learning_rate=rate)
                    commits.append(txn.commit(step=step))
            except UpdateRejectedError as error:
                rejected = dict(error.details)
        logged = [each["step"] for each in store.history() if each["kind"] == "commit"]
        assert logged == [each.step for each in commits]
    return [{n: str(e.digest) for n, e in each.shards.items()} for each in commits], rejected


def test_a_rejected_step_leaves_the_bytes_of_a_run_that_never_saw_it(tmp_path: Path) -> None:
    never, _ = commits_of(tmp_path / "never", is_guarded=True, sees_it=False)
    guarded, record = commits_of(tmp_path / "guarded", is_guarded=True, sees_it=True)
    unguarded, _ = commits_of(tmp_path / "control", is_guarded=False, sees_it=True)
    assert guarded == never
    assert unguarded[:HARMFUL] == never[:HARMFUL]
    assert unguarded[HARMFUL] != never[HARMFUL], "control: the batch did no harm"
    assert record["attempts"] == len(record["tried"]) == 3
    assert [each["lr_scale"] for each in record["tried"]] == [1.0, 0.9, 0.8]
    assert not record["accepted"]
    assert record["loss_after"] > record["loss_before"] + 0.02


def test_a_milder_attempt_is_the_step_that_it_would_be_alone(tmp_path: Path) -> None:
    """The first attempt fails; the second must not see anything of it."""
    plain = EngineOptions(lm_head_chunk_tokens=16)
    policy = {"guard_replay_lr_scales": (300.0, 0.1), "guard_replay_grad_norm_scales": (1.0, 0.5)}
    guarded = EngineOptions(lm_head_chunk_tokens=16, **{**GUARD, **policy})
    digests = []
    for name, options in (("plain", plain), ("guarded", guarded)):
        engine = Engine(TINY, options, Device.from_name("cpu"))
        with shardb.open(tmp_path / name, create=True) as store:
            with store.begin() as txn:
                engine.initialise(txn, 3)
                txn.commit(step=0)
            with store.begin() as txn:
                if options.guard is None:
                    engine.train_step(
                        txn,
                        micro_batches(1, 2),
                        step=1,
                        learning_rate=0.1 * RATE,
                        grad_norm_scale=0.5,
                    )
                else:
                    _, record = train_guarded(
                        engine, txn, micro_batches(1, 2), step=1, learning_rate=RATE
                    )
                    assert record is not None
                    assert (record["attempts"], record["accepted_lr_scale"]) == (2, 0.1)
                    assert record["accepted_loss_after"] < record["loss_before"]
                digests.append({n: e.digest for n, e in txn.commit(step=1).shards.items()})
    assert digests[0] == digests[1]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_data(tmp_path / "data", rows=60)


def guard_flags(*more: str) -> list[str]:
    return ["--guarded-step-replay", *more]


def test_each_commit_says_what_the_guard_did(data: Path, tmp_path: Path) -> None:
    store, plain = tmp_path / "run", tmp_path / "plain"
    assert train_here(arguments(store, data, "--max-steps", "3", *guard_flags())) == 0
    for line in step_lines(store):
        record = line["guarded_step_replay"]
        assert record["active"]
        assert record["accepted"]
        assert record["attempts"] == 1
        assert record["loss_before"] == line["loss"]
        assert record["accepted_loss_after"] < line["loss"]
        assert (line["skipped_steps"], line["skip_rate"]) == (0, 0.0)
        assert 0 < line["timings"]["guard_replay_seconds"] < line["seconds"]
    assert train_here(arguments(plain, data, "--max-steps", "3")) == 0
    assert all("guard_replay_seconds" not in line["timings"] for line in step_lines(plain))
    mine, theirs = step_records(store)[3].shards, step_records(plain)[3].shards
    trained = [name for name in mine if not name.startswith("meta/")]
    assert all(mine[name] == theirs[name] for name in trained), "an accepted step is the plain one"


def test_an_exhausted_guard_accepts_the_last_attempt_if_told_to(data: Path, tmp_path: Path) -> None:
    flags = guard_flags("--learning-rate", "1.0", "--guard-replay-lr-scales", "1.0,0.9")
    assert train_here(arguments(tmp_path / "run", data, "--max-steps", "1", *flags)) == 0
    [line] = step_lines(tmp_path / "run")
    record = line["guarded_step_replay"]
    assert (record["accepted"], record["attempts"]) == (False, 3)
    assert [each["lr_scale"] for each in record["tried"]] == [1.0, 0.9, 0.9]


def test_skips_are_counted_and_end_at_the_limit(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "run"
    assert train_here(arguments(store, data, "--max-steps", "1")) == 0
    before = step_records(store)[1]
    harmful = guard_flags("--guard-replay-on-exhaust", "skip", "--learning-rate", "5.0")
    limit = ["--max-steps", "9", "--max-skipped-steps", "4"]
    assert train_here(arguments(store, None, *limit, *harmful)) == 2
    said = capsys.readouterr().err
    assert "4 batches in a row were skipped (4 update_rejected)" in said
    assert "lower --learning-rate" in said
    assert step_records(store) == {0: step_records(store)[0], 1: before}
