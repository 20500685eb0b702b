"""Is the loss told that no check of the store can see, and a link to nothing named?"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import shardb
from shardb import branching
from shardb.cli import run as shardb_command
from shardb.filesystem import RealFileSystem
from shardb.log import Log
from tests.support.active_runs import head
from tests.support.training import arguments, train_here


def record_end(store: Path, step: int) -> int:
    """Give where the record of a step ends in the first segment."""
    scan = Log(RealFileSystem(), str(store / "wal")).scan(1)
    ends = [frame.end for frame in scan.frames]
    with shardb.open(store) as opened:
        steps = [record.get("step") for record in opened.history()]
    return ends[steps.index(step)]


def test_is_a_log_cut_to_the_byte_told(
    plain: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(plain, store)
    with open(store / "wal" / "0000000001.wal", "r+b") as file:
        file.truncate(record_end(store, 7))
    shutil.rmtree(store / "index")
    assert head(store).step == 7, "the store looks whole"
    capsys.readouterr()
    assert train_here(arguments(store, None, "--max-steps", "9")) == 0
    said = capsys.readouterr().err
    assert "step 8 was durable once, says logs/steps.jsonl, and the store's newest is 7" in said
    assert train_here(arguments(store, None, "--max-steps", "10")) == 0
    assert "was durable once" not in capsys.readouterr().err


def test_is_a_rewind_no_loss(plain: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(plain, store)
    with shardb.open(store) as opened:
        branching.rewind(opened, "main", "step-7")
    capsys.readouterr()
    assert train_here(arguments(store, None, "--max-steps", "8")) == 0
    assert "was durable once" not in capsys.readouterr().err


def test_is_a_store_that_is_a_link_to_nothing_named(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "unmounted" / "run")
    for given in (data, None):
        assert train_here(arguments(link, given, "--max-steps", "1")) == 2
        assert f"{link}: this is a link that leads nowhere" in capsys.readouterr().err
    assert shardb_command(["show", str(link)]) == 4
    assert f"{link}: there is no store here: this is a link that" in capsys.readouterr().err
    assert not (tmp_path / "unmounted").exists()
