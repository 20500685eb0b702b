"""Is an active store that cannot be trained in refused by name, with nothing lost by it?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import shardb
from shardb import branching
from shardb.errors import StorageFullError
from shardb.transfer_publisher import Publisher
from tests.support.active_runs import (
    head,
)
from tests.support.training import arguments, train_here
from trainer import budget


def test_the_active_store_of_another_run_is_refused(
    data: Path, store: Path, active: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    assert train_here(arguments(other, data, "--max-steps", "2", "--active", str(active))) == 0
    assert train_here(arguments(store, data, "--max-steps", "1")) == 0
    before = head(store).id, head(active).id
    capsys.readouterr()
    assert train_here(arguments(store, None, "--max-steps", "2", "--active", str(active))) == 5
    assert "no history in common" in capsys.readouterr().err
    third = tmp_path / "third"
    assert train_here(arguments(third, data, "--max-steps", "2", "--active", str(active))) == 5
    assert f"{third} does not exist" in capsys.readouterr().err
    assert (head(store).id, head(active).id) == before
    assert not third.exists()


def test_a_rewound_store_is_not_overruled_by_its_active_one(
    data: Path, store: Path, active: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--max-steps", "6", "--active", str(active), "--save-every", "3")
    assert train_here(arguments(store, data, *flags)) == 0
    with shardb.open(store) as opened:
        branching.rewind(opened, "main", "step-3")
    capsys.readouterr()
    assert train_here(arguments(store, None, "--max-steps", "7")) == 5
    said = capsys.readouterr().err
    assert "rewound to step 3" in said
    assert "still at step 6" in said
    assert head(active).step == 6
    # As the message says: without the folder the run goes on from step 3.
    shutil.rmtree(active)
    assert train_here(arguments(store, None, "--max-steps", "4", "--save-every", "0")) == 0
    assert head(store).step == 4
    # And the rewind of then is no reason to refuse the steps made since.
    assert train_here(arguments(store, None, "--max-steps", "5")) == 0


def test_two_active_stores_ahead_of_one_run_are_not_chosen_between(
    data: Path,
    store: Path,
    active: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train_here(arguments(store, data, "--max-steps", "2", "--active", str(active))) == 0
    other = active.parent / "other"
    shutil.copytree(active, other)
    for place in (active, other):
        with shardb.open(place) as opened, opened.begin() as txn:
            for name, entry in opened.branches()["main"].shards.items():
                if entry.trainable:
                    txn.write(name, txn.read(name).arrays())
            txn.commit(step=3, state=dict(txn.base.state) if txn.base else {})
    capsys.readouterr()
    assert train_here(arguments(store, None, "--max-steps", "4", "--active", str(other))) == 5
    assert "each on its own" in capsys.readouterr().err


def test_a_damaged_active_store_is_told_with_the_durable_step(
    data: Path, store: Path, active: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_here(arguments(store, data, "--max-steps", "2", "--active", str(active))) == 0
    segment = sorted((active / "wal").glob("*.wal"))[-1]
    segment.write_bytes(segment.read_bytes()[:100])
    capsys.readouterr()
    assert train_here(arguments(store, None, "--max-steps", "3")) == 3
    said = capsys.readouterr().err
    assert "newest durable step is 2" in said
    shutil.rmtree(active)
    assert train_here(arguments(store, None, "--max-steps", "3")) == 0


def test_an_active_store_inside_the_store_is_refused(
    data: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in (store, store / "active", store.parent):
        assert train_here(arguments(store, data, "--active", str(place))) == 2
        assert "--active" in capsys.readouterr().err
    assert not store.exists()


def test_an_active_store_below_a_file_is_refused_before_anything_is_made(
    data: Path, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, dangling = tmp_path / "book.txt", tmp_path / "link"
    file.write_text("x")
    dangling.symlink_to(tmp_path / "gone")
    for place in (file, file / "active", dangling / "active"):
        assert train_here(arguments(store, data, "--max-steps", "1", "--active", str(place))) == 2
        assert f"--active {place}: " in capsys.readouterr().err
    assert not store.exists()


def test_a_ram_disk_that_is_too_small_is_refused_by_name_before_anything_is_made(
    data: Path,
    store: Path,
    active: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    room = {str(active.parent): 1 << 20}
    true_free = budget._free_bytes
    monkeypatch.setattr(
        budget, "_free_bytes", lambda folder: room.get(str(folder), true_free(folder))
    )
    flags = ("--max-steps", "2", "--active", str(active))
    assert train_here(arguments(store, data, *flags)) == 6
    said = capsys.readouterr().err
    assert "RAM disk" in said
    assert "--active-copies" in said
    assert not store.exists()
    assert not active.exists()
    # The memory that the RAM disk takes is counted as memory.
    monkeypatch.setattr(budget, "machine_memory", lambda: (8 << 30, 8 << 30))
    for name in ("STORE_LEAST_BYTES", "STORE_OVERHEAD_BYTES"):
        monkeypatch.setattr(budget, name, 9 << 30)
    monkeypatch.setattr(budget, "_free_bytes", lambda _: 99 << 30)
    assert train_here(arguments(store, data, *flags)) == 2
    assert "most of it for the RAM disk" in capsys.readouterr().err
    assert not store.exists()


def test_a_publication_that_fails_ends_the_run_and_loses_nothing(
    data: Path,
    store: Path,
    active: Path,
    plain: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*_: object) -> shardb.Commit:
        raise StorageFullError("the disk is full")

    flags = ("--max-steps", "8", "--active", str(active), "--durable-every", "2")
    with monkeypatch.context() as patch:
        patch.setattr(Publisher, "_copy", full)
        assert train_here(arguments(store, data, *flags)) == 6
    said = capsys.readouterr().err
    assert "the disk is full" in said
    assert f"is only in {active}" in said
    assert head(store).step == 0
    reached = head(active).step
    assert 2 <= reached <= 4
    assert train_here(arguments(store)) == 0
    assert head(store).shards == head(plain).shards


def test_a_dry_run_tells_the_ram_disk(
    data: Path, store: Path, active: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--max-steps", "2", "--active", str(active), "--dry-run")
    assert train_here(arguments(store, data, *flags)) == 0
    assert f"3 copies in {active}" in capsys.readouterr().out
    assert train_here(arguments(store, data, *flags, "--json")) == 0
    told = json.loads(capsys.readouterr().out)["budget"]
    assert told["active_bytes"] > 3 * told["bytes_written_per_step"]
    assert told["memory"]["the RAM disk"] == told["active_bytes"]
    assert not store.exists()


@pytest.mark.parametrize("what", ["a folder", "a file", "a link"])
@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=["run", "dry run"])
def test_a_place_where_no_active_store_can_be_is_refused_before_anything_is_made(
    data: Path,
    store: Path,
    active: Path,
    capsys: pytest.CaptureFixture[str],
    what: str,
    more: list[str],
) -> None:
    if what == "a folder":
        active.mkdir()
        (active / "letters").write_text("mine")
    elif what == "a file":
        active.write_text("mine")
    else:
        active.symlink_to(active.parent / "not-mounted")
    call = arguments(store, data, "--max-steps", "2", "--active", str(active), *more)
    assert train_here(call) == 2
    assert f"--active {active}: " in capsys.readouterr().err
    assert not store.exists()
