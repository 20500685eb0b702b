"""Does a run in an active store publish what it promised, and go on from the newest step?"""

from __future__ import annotations

import shutil
import time
from functools import partial
from pathlib import Path

import pytest

import shardb
from shardb import branching
from shardb.errors import ShardbError
from shardb.objects import StagedObject
from shardb.transfer import copy_commit
from shardb.transfer_publisher import Publisher
from tests.support.active_runs import (
    head,
    logged_steps,
    pinned_steps,
    published_steps,
    train_until_killed,
)
from tests.support.training import arguments, step_lines, step_records, train_here
from trainer.active import TwoTiers
from trainer.run import Run
from trainer.watchdog import Watchdog


def test_an_active_run_has_the_bytes_of_a_plain_one_and_ends_durable(
    data: Path, store: Path, active: Path, plain: Path
) -> None:
    flags = ("--max-steps", "8", "--active", str(active), "--durable-every", "3")
    assert train_here(arguments(store, data, *flags)) == 0
    assert head(store).shards == head(active).shards == head(plain).shards
    assert head(store).id == head(active).id
    lines = step_lines(store)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["loss"] for line in lines] == [line["loss"] for line in step_lines(plain)]
    assert all(line["durable_step"] <= line["step"] for line in lines)
    assert {line["durable_step"] for line in lines} <= {0, 3, 6}
    assert lines[-1]["durable_step"] in (3, 6)
    assert max(line["publish_pending"] for line in lines) == 1
    # Three publications, and no step is missing in between.
    assert published_steps(store) == [0, 3, 6, 8]
    assert logged_steps(store) == list(range(9))


def test_without_an_interval_snapshots_and_the_end_are_published(
    data: Path, store: Path, active: Path
) -> None:
    flags = ("--max-steps", "7", "--active", str(active), "--save-every", "3")
    assert train_here(arguments(store, data, *flags)) == 0
    assert published_steps(store) == [0, 3, 6, 7]
    assert pinned_steps(store) == {"step-3": 3, "step-6": 6}
    assert pinned_steps(active) == {}
    with shardb.open(store) as opened, opened.snapshot("step-3") as view:
        assert view.read("params/block_000").specs


def test_older_names_of_the_flags(data: Path, store: Path, active: Path) -> None:
    flags = ("--active-run-dir", str(active), "--durable-flush-every", "2", "--max-steps", "3")
    assert train_here(arguments(store, data, *flags)) == 0
    assert head(store).state["settings"]["active"] == str(active)
    assert head(store).state["settings"]["durable_every"] == 2


def test_a_publication_that_takes_long_is_said_with_what_waits_for_it(
    data: Path,
    store: Path,
    active: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    true_copy = Publisher._copy

    def slowly(publisher: Publisher, *args: object) -> shardb.Commit:
        time.sleep(0.5)
        return true_copy(publisher, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Publisher, "_copy", slowly)
    flags = ("--max-steps", "3", "--active", str(active), "--active-copies", "2")
    assert train_here(arguments(store, data, *flags, "--durable-every", "1")) == 0
    assert "waits for" not in capsys.readouterr().err
    monkeypatch.setattr("trainer.start.Watchdog", partial(Watchdog, wait_seconds=0.1))
    more = ("--max-steps", "5", "--durable-every", "1")
    assert train_here(arguments(store, None, *more)) == 0
    said = capsys.readouterr().err
    assert f"waits for step 4 to be published to {store}: " in said
    assert " are copied" in said


def test_a_commit_that_takes_long_is_said_with_what_it_waits_for(
    data: Path, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    true_sync = shardb.Store.sync_objects

    def slowly(opened: shardb.Store, staged: list[StagedObject]) -> None:
        time.sleep(0.5)
        true_sync(opened, staged)

    monkeypatch.setattr(shardb.Store, "sync_objects", slowly)
    monkeypatch.setattr("trainer.start.Watchdog", partial(Watchdog, wait_seconds=0.1))
    assert train_here(arguments(store, data, "--max-steps", "1")) == 0
    assert "step 1 waits to be committed: 0 shards are still to be" in capsys.readouterr().err


@pytest.mark.parametrize(("copies", "kept"), [("2", 1), ("3", 1), ("5", 3)])
def test_the_active_store_never_holds_more_copies_than_it_may(
    data: Path, store: Path, active: Path, monkeypatch: pytest.MonkeyPatch, copies: str, kept: int
) -> None:
    """Publications that take long, so that commits would pile up behind them."""
    true_step, most_bytes = Run.step, 0

    def measured(run: Run) -> dict[str, object]:
        nonlocal most_bytes
        line = true_step(run)
        files = [*(active / "objects").iterdir(), *(active / "spare").iterdir()]
        most_bytes = max(most_bytes, sum(f.stat().st_size for f in files if f.exists()))
        return line

    slow = Publisher._copy

    def slowly(publisher: Publisher, *args: object) -> shardb.Commit:
        time.sleep(0.05)
        return slow(publisher, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Run, "step", measured)
    monkeypatch.setattr(Publisher, "_copy", slowly)
    flags = ("--max-steps", "12", "--active", str(active), "--active-copies", copies)
    assert train_here(arguments(store, data, *flags, "--durable-every", "4")) == 0
    with shardb.open(active) as opened:
        assert branching.policy_of(opened).keep_last == kept
        assert len(opened.commits()) == kept
    commit_bytes = sum(e.bytes for e in head(store).shards.values() if e.trainable)
    meta_bytes = 64 << 10
    assert most_bytes <= int(copies) * commit_bytes + meta_bytes
    if copies == "2":  # back-pressure is visible
        assert max(line["publish_seconds"] for line in step_lines(store)) > 0.01


def test_steps_go_on_for_as_long_as_a_publication_takes(
    data: Path, store: Path, active: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_step, true_copy, steps_made = Run.step, Publisher._copy, 0

    def counted(run: Run) -> dict[str, object]:
        nonlocal steps_made
        line = true_step(run)
        steps_made += 1
        return line

    def behind_four_steps(publisher: Publisher, *given: object) -> shardb.Commit:
        wanted, deadline = min(steps_made + 4, 9), time.monotonic() + 20
        while steps_made < wanted:
            assert time.monotonic() < deadline, f"no step is made beside it: {steps_made}"
            time.sleep(0.005)
        return true_copy(publisher, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Run, "step", counted)
    monkeypatch.setattr(Publisher, "_copy", behind_four_steps)
    flags = ("--max-steps", "10", "--active", str(active), "--active-copies", "3")
    assert train_here(arguments(store, data, *flags, "--durable-every", "5")) == 0
    assert [line["durable_step"] for line in step_lines(store)][-1] == 5
    assert (head(store).step, logged_steps(store)) == (10, list(range(11)))


def test_after_a_kill_the_exact_newest_step_goes_on(
    data: Path, store: Path, active: Path, plain: Path
) -> None:
    flags = ("--max-steps", "8", "--active", str(active), "--durable-every", "3")
    train_until_killed(arguments(store, data, *flags), after=5)
    assert (head(store).step, head(active).step) == (3, 5)
    newest = head(active).id
    assert train_here(arguments(store)) == 0
    with shardb.open(active) as opened:
        parents = [r["parent"] for r in opened.history() if r["kind"] == "commit"]
    assert newest in parents, "step 6 was made from the step 5 that was there"
    assert head(store).shards == head(plain).shards
    assert [line["step"] for line in step_lines(store)] == list(range(1, 9))
    assert logged_steps(store) == list(range(9))


def test_after_power_loss_the_newest_durable_step_goes_on(
    data: Path, store: Path, active: Path, plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--max-steps", "8", "--active", str(active), "--durable-every", "3")
    train_until_killed(arguments(store, data, *flags), after=5)
    shutil.rmtree(active)
    capsys.readouterr()
    assert train_here(arguments(store)) == 0
    told = capsys.readouterr().err
    assert f"warning: {active}: the active store is gone, as after a restart" in told
    assert "goes on after step 3, the newest durable one: what came behind it, to step 4" in told
    assert head(store).shards == head(plain).shards == head(active).shards
    lines = step_lines(store)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["loss"] for line in lines] == [line["loss"] for line in step_lines(plain)]
    assert logged_steps(store) == list(range(9))


def test_a_step_log_lost_with_the_power_is_made_again_without_a_gap(
    data: Path, store: Path, active: Path
) -> None:
    flags = ("--max-steps", "7", "--active", str(active), "--durable-every", "3")
    assert train_here(arguments(store, data, *flags)) == 0
    before = step_lines(store)
    (store / "logs" / "steps.jsonl").unlink()
    shutil.rmtree(active)
    assert train_here(arguments(store, None, "--max-steps", "8")) == 0
    after = step_lines(store)
    assert [line["step"] for line in after] == list(range(1, 9))
    assert [line["loss"] for line in after[:7]] == [line["loss"] for line in before]
    assert all(line["durable_step"] <= line["step"] for line in after)


def test_an_active_store_that_is_behind_is_brought_forward(
    data: Path, store: Path, active: Path, plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_here(arguments(store, data, "--max-steps", "3", "--active", str(active))) == 0
    capsys.readouterr()
    assert train_here(arguments(store, None, "--max-steps", "6", "--active", "off")) == 0
    assert f"{active}: training goes on without this folder" in capsys.readouterr().err
    assert (head(store).step, head(active).step) == (6, 3)
    assert train_here(arguments(store, None, "--max-steps", "8", "--active", str(active))) == 0
    assert head(active).id == head(store).id
    assert head(store).shards == head(plain).shards


@pytest.mark.parametrize("to", ["off", "other"])
def test_leaving_an_active_store_that_is_ahead_takes_its_steps_along(
    data: Path,
    store: Path,
    active: Path,
    plain: Path,
    to: str,
) -> None:
    """The kill comes before anything was published that names the active store."""
    assert train_here(arguments(store, data, "--max-steps", "2")) == 0
    flags = ("--max-steps", "8", "--active", str(active))
    train_until_killed(arguments(store, None, *flags), after=5)
    assert (head(store).step, head(active).step) == (2, 5)
    fifth = head(active).id
    elsewhere = "off" if to == "off" else str(active.parent / "other")
    assert train_here(arguments(store, None, "--active", elsewhere)) == 0
    with shardb.open(store) as opened:
        assert fifth in [r["id"] for r in opened.history() if r["kind"] == "commit"]
    assert head(store).shards == head(plain).shards
    assert head(active).id == fifth


def test_a_finished_run_that_was_never_published_is(data: Path, store: Path, active: Path) -> None:
    flags = ("--max-steps", "4", "--active", str(active))
    train_until_killed(arguments(store, data, *flags), after=4)
    assert head(store).step == 0
    assert train_here(arguments(store)) == 0
    assert head(store).id == head(active).id
    # Now there is nothing to do any more.
    assert train_here(arguments(store)) == 0


def test_another_branch_in_the_same_active_store_takes_the_place_of_the_first(
    data: Path, store: Path, active: Path, plain: Path
) -> None:
    """What the first branch had not published is published before its space is given back."""
    flags = ("--max-steps", "8", "--active", str(active), "--save-every", "3")
    train_until_killed(arguments(store, data, *flags), after=5)
    retry = ("--branch", "retry", "--from", "step-3", "--learning-rate", "0.001")
    assert train_here(arguments(store, None, *retry, "--max-steps", "6")) == 0
    with shardb.open(active) as opened:
        assert list(opened.branches()) == ["retry"]
        assert len(opened.commits()) == 1
    assert head(store).step == 5
    assert head(store, "retry").step == 6
    assert train_here(arguments(store)) == 0
    assert head(store).shards == head(plain).shards
    with shardb.open(active) as opened:
        assert list(opened.branches()) == ["main"]
    assert head(store, "retry").step == 6


def test_a_snapshot_whose_publication_was_killed_is_made_up_for(
    data: Path, store: Path, active: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> shardb.Commit:
        raise ShardbError("killed in the middle of a copy")

    flags = ("--max-steps", "8", "--active", str(active), "--save-every", "2")
    with monkeypatch.context() as patch:
        patch.setattr(Publisher, "_copy", killed)
        patch.setattr(TwoTiers, "finish", lambda *_: None)
        assert train_here(arguments(store, data, *flags)) != 0
    assert sorted(pinned_steps(active)) == ["step-2"]
    assert pinned_steps(store) == {}
    assert train_here(arguments(store)) == 0
    assert sorted(pinned_steps(store)) == ["step-2", "step-4", "step-6", "step-8"]
    assert pinned_steps(active) == {}
    assert pinned_steps(store)["step-2"] == 2
    assert logged_steps(store) == list(range(9))


def test_a_run_on_a_ram_disk_alone_calls_no_step_durable(
    data: Path, active: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_here(arguments(active, data, "--max-steps", "2")) == 0
    out, err = capsys.readouterr()
    assert "step=2 " in out
    assert " durable=0 " in out
    assert "nothing in it survives power loss" in err
    assert [line["durable_step"] for line in step_lines(active)] == [0, 0]


def test_control_a_skipped_publication_is_noticed(
    data: Path, store: Path, active: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TwoTiers, "finish", lambda *_: None)
    assert train_here(arguments(store, data, "--max-steps", "2", "--active", str(active))) == 0
    assert head(store).id != head(active).id
    with shardb.open(active) as one, shardb.open(store) as other:
        copy_commit(one, other)
    assert head(store).id == head(active).id
    assert step_records(active)[2].loss != step_records(active)[1].loss
