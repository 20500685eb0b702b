"""Is a directory there whole or not at all, and is nothing removed that is no data set?"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from shardb.errors import ConflictError
from tests.unit.trainer.test_data_manifest import manifest
from trainer.data import publish
from trainer.data.publish import partial_directory, refuse_target, remove_abandoned
from trainer.errors import InputError


def fill(folder: Path, mark: str) -> None:
    (folder / "train").mkdir(parents=True)
    (folder / "train" / "a.npy").write_text(mark)
    (folder / "manifest.json").write_text(manifest().to_json(), encoding="utf-8")


def contents(folder: Path) -> dict[str, str]:
    return {p.name: p.read_text() for p in sorted(folder.rglob("*")) if p.name == "a.npy"}


def test_is_nothing_seen_before_it_is_published(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "data"
    with partial_directory(target) as partial:
        fill(partial.path, "new")
        assert not target.exists()
        partial.publish()
        assert contents(target) == {"a.npy": "new"}
    assert contents(target) == {"a.npy": "new"}
    assert os.listdir(target.parent) == ["data"]


def fail_half_way(target: Path) -> None:
    with partial_directory(target) as partial:
        fill(partial.path, "new")
        raise RuntimeError


def test_is_nothing_left_after_a_failure(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        fail_half_way(tmp_path / "data")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("in_one_step", [True, False])
def test_does_the_new_take_the_place_of_the_old(
    in_one_step: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_one_step:
        monkeypatch.setattr(publish, "_exchange_in_one_step", lambda *_: False)
    fill(tmp_path / "data", "old")
    with partial_directory(tmp_path / "data", overwrite=True) as partial:
        fill(partial.path, "new")
        partial.publish()
        assert contents(partial.path) == {"a.npy": "old"}
    assert contents(tmp_path / "data") == {"a.npy": "new"}
    assert os.listdir(tmp_path) == ["data"]


def test_is_an_old_directory_kept_when_the_new_fails(tmp_path: Path) -> None:
    fill(tmp_path / "data", "old")
    with pytest.raises(RuntimeError):
        fail_half_way(tmp_path / "data")
    assert contents(tmp_path / "data") == {"a.npy": "old"}
    assert os.listdir(tmp_path) == ["data"]


def test_can_the_exchange_be_done_in_one_step_here(tmp_path: Path) -> None:
    fill(tmp_path / "a", "a")
    fill(tmp_path / "b", "b")
    if not publish._exchange_in_one_step(tmp_path / "a", tmp_path / "b"):
        pytest.skip(f"the file system of {tmp_path} cannot exchange two directories")
    assert contents(tmp_path / "a") == {"a.npy": "b"}
    assert contents(tmp_path / "b") == {"a.npy": "a"}


def test_is_what_a_killed_process_left_removed_but_not_what_a_live_one_builds(
    tmp_path: Path,
) -> None:
    target = tmp_path / "data"
    for name in ("data.partial-1-dead", "data.partial-2-live", "other.partial-3-dead"):
        fill(tmp_path / name, name)
    (tmp_path / "data.partial-file").write_text("not ours")
    lock = os.open(tmp_path / "data.partial-2-live", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert remove_abandoned(target) == [tmp_path / "data.partial-1-dead"]
    assert sorted(os.listdir(tmp_path)) == [
        "data.partial-2-live",
        "data.partial-file",
        "other.partial-3-dead",
    ]
    os.close(lock)
    assert remove_abandoned(target) == [tmp_path / "data.partial-2-live"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_does_a_second_process_leave_the_first_alone(overwrite: bool, tmp_path: Path) -> None:
    with partial_directory(tmp_path / "data", overwrite=overwrite) as first:
        fill(first.path, "first")
        with partial_directory(tmp_path / "data") as second:
            fill(second.path, "second")
            second.publish()
        if overwrite:
            first.publish()
        else:
            with pytest.raises(ConflictError, match="there already"):
                first.publish()
    assert contents(tmp_path / "data") == {"a.npy": "first" if overwrite else "second"}
    assert os.listdir(tmp_path) == ["data"]


def test_is_what_was_put_there_in_the_meantime_not_replaced(tmp_path: Path) -> None:
    fill(tmp_path / "data", "old")
    with partial_directory(tmp_path / "data", overwrite=True) as partial:
        fill(partial.path, "new")
        (tmp_path / "data" / "notes.txt").write_text("mine")
        with pytest.raises(InputError, match=r"holds notes\.txt"):
            partial.publish()
    assert contents(tmp_path / "data") == {"a.npy": "old"}


def test_is_a_directory_taken_for_abandoned_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = fcntl.flock, []

    def flock(descriptor: int, operation: int) -> None:
        calls.append(operation)
        if len(calls) == 1:  # Somebody was quicker, between mkdir and flock.
            [path] = tmp_path.glob("data.partial-*")
            path.rmdir()
        real(descriptor, operation)

    monkeypatch.setattr(publish.fcntl, "flock", flock)
    with partial_directory(tmp_path / "data") as partial:
        fill(partial.path, "new")
        partial.publish()
    assert contents(tmp_path / "data") == {"a.npy": "new"}
    assert len(calls) == 2


def test_is_a_directory_that_is_there_a_conflict(tmp_path: Path) -> None:
    fill(tmp_path / "data", "old")
    (tmp_path / "empty").mkdir()
    for name, reason in (("data", "there already"), ("empty", "an empty directory")):
        with pytest.raises(ConflictError, match=reason) as caught:
            refuse_target(tmp_path / name, overwrite=False)
        assert caught.value.exit_code == 5
        assert refuse_target(tmp_path / name, overwrite=True) == tmp_path / name


def test_is_what_is_no_data_set_never_replaced(tmp_path: Path) -> None:
    fill(tmp_path / "mine", "old")
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    (tmp_path / "lookalike" / "train").mkdir(parents=True)
    fill(tmp_path / "foreign", "old")
    (tmp_path / "foreign" / "manifest.json").write_text("{}")
    (tmp_path / "file").write_text("x")
    reasons = {
        "mine": r"holds thesis\.txt, which no prepared data set has",
        "lookalike": "not a prepared data set",
        "foreign": "not a prepared data set",
        "file": "not a directory",
    }
    for name, reason in reasons.items():
        with pytest.raises(InputError, match=reason):
            refuse_target(tmp_path / name, overwrite=True)
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_is_a_link_followed_and_kept(tmp_path: Path) -> None:
    fill(tmp_path / "real", "old")
    (tmp_path / "link").symlink_to("real")
    target = refuse_target(tmp_path / "link", overwrite=True)
    with partial_directory(target, overwrite=True) as partial:
        fill(partial.path, "new")
        partial.publish()
    assert (tmp_path / "link").is_symlink()
    assert contents(tmp_path / "real") == {"a.npy": "new"}
