"""Do the verbs work beside a live writer, without disturbing it and without false alarms?"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import shardb
from shardb.gc import collect_garbage
from tests.support.commands import PROGRAM, REPOSITORY, shardb_command
from tests.support.small_stores import fill_store, flip_bit, fsck, kinds, object_of, tree
from tests.support.store_workers import commit_steps, hold_lease, hold_writer, started
from tests.support.stores import commit_step


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of checks does not leave the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_does_fsck_find_nothing_beside_a_writer(root: Path) -> None:
    """Objects are retired and their files recycled all the while."""
    with started(commit_steps, root) as writer:
        writer.line()
        first = writer.line()
        for _ in range(25):
            report = fsck(root)
            assert report.findings == []
            assert report.complete
        answer = shardb_command("fsck", root, "--json")
        assert (answer.code, answer.json["findings"]) == (0, [])
        writer.kill()
        assert int(first) < last_step(root) - 10, "the writer did not go on meanwhile"
    assert not fsck(root).has_errors


def test_does_fsck_find_damage_beside_a_writer(root: Path) -> None:
    """The control: real damage is not taken for the writer's doing."""
    with started(commit_steps, root) as writer:
        writer.line()
        assert shardb_command("snapshot", root, "kept").code == 0
        with shardb.open(root) as store:
            step = store.snapshots()["kept"].step
        flip_bit(object_of(root, step, "params/a"), -1)
        for _ in range(3):
            report = fsck(root)
            assert [(f.kind, f.snapshots) for f in report.findings] == [
                ("object_corrupt", ("kept",))
            ]


def test_does_gc_beside_a_writer_take_nothing_it_needs(root: Path) -> None:
    with started(commit_steps, root) as writer:
        for _ in range(15):
            writer.line()
            collect_garbage(str(root))
        assert shardb_command("gc", root).code == 0
        writer.line()
        writer.kill()
    report = fsck(root)
    assert not report.has_errors
    with shardb.open(root) as store, store.at() as view:
        assert len(view.names()) == 2
        _ = [view.read(name).arrays() for name in view.names()]


def test_do_the_other_verbs_work_beside_a_writer(root: Path) -> None:
    with started(commit_steps, root) as writer:
        step = int(writer.line())
        shown = shardb_command("show", root, "--json").json
        assert shown["step"] >= step
        assert shardb_command("log", root, "--json").json[-1]["step"] >= shown["step"]
        assert shardb_command("ls", root).code == 0
        info = shardb_command("info", root, "--json").json
        assert info["branches"]["main"]["writer"]["pid"] == writer.process.pid
        pinned = shardb_command("snapshot", root, "now", "--verify", "--json")
        assert pinned.json["step"] >= shown["step"]
        assert int(writer.line()) > 0


def test_does_recover_beside_a_writer_change_nothing(root: Path) -> None:
    fill_store(root, range(3))
    with started(hold_writer, root) as writer:
        assert writer.line() == "writing"
        before = content(root)
        answer = shardb_command("recover", root, "--json")
        assert content(root) == before
        assert answer.code == 0
        (warning,) = [w for w in answer.json["warnings"] if w["what"] == "live writer"]
        assert str(writer.process.pid) in warning["why"]
        assert "nothing was changed" in warning["why"]
        assert answer.json["opened"]["main"]["step"] == 2
        assert answer.json["dropped"] == []


def test_does_a_killed_reader_leave_only_an_info(root: Path) -> None:
    with shardb.open(root, create=True) as store:
        commit_step(store, 1)
    with started(hold_lease, root, "step-1") as reader:
        reader.line()
        reader.kill()
    report = fsck(root)
    assert kinds(report) == ["lease_of_dead_reader"]
    assert not report.has_errors
    collect_garbage(str(root))
    assert fsck(root).findings == []


def test_is_a_killed_writer_recovered_and_clean(root: Path) -> None:
    with started(commit_steps, root) as writer:
        for _ in range(5):
            step = int(writer.line())
        writer.kill()
    told = shardb_command("recover", root, "--json")
    assert told.code == 0
    assert told.json["opened"]["main"]["step"] >= step
    assert shardb_command("fsck", root, "--json").code == 0


def test_does_an_interrupt_end_a_command_with_130(root: Path) -> None:
    """The command waits for the log's lock, which another process keeps; then it is interrupted."""
    fill_store(root, range(2))
    with shardb.open(root) as store, store.locks.wal():
        command = [sys.executable, "-c", f"print('up', flush=True); {PROGRAM}", "fsck", str(root)]
        process = subprocess.Popen(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said.strip().splitlines()[-1] == "error: interrupted"


def last_step(root: Path) -> int:
    with shardb.open(root) as store:
        return store.resolve().step


def content(root: Path) -> dict[str, bytes]:
    """Every byte of a store, but the table of readers that LMDB keeps."""
    return {path: data for path, (data, _) in tree(root).items() if path != "index/lock.mdb"}
