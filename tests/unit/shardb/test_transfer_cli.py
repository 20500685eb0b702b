"""Do the verbs say what they did, to people and to scripts?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import shardb
from shardb.cli.transfer_display import TransferDisplay, progress_text
from shardb.transfer_tally import Counts
from tests.support.commands import PROGRAM, REPOSITORY, Ask, check_refused
from tests.support.transfer_stores import commit, contents


@pytest.fixture
def run(quick_path: Path) -> Path:
    """A store with steps 0 to 2, step 1 pinned as `best`."""
    with shardb.open(quick_path / "run", create=True) as store:
        for step in range(3):
            commit(store, step, size=3000)
            if step == 1:
                store.create_snapshot("best")
    return quick_path / "run"


def test_what_does_push_say(ask: Ask, run: Path, quick_path: Path) -> None:
    target = quick_path / "copy"
    first = ask("push", run, target)
    assert first.code == 0
    assert first.out.startswith(f"pushed to {target}: branch main at step 2 (commit ")
    assert "4 objects" in first.out
    assert "nothing to copy, it was there already" in ask("push", run, target).out
    told = ask("push", run, target, "--json").json
    assert told["step"] == 2
    assert told["branch"] == "main"
    assert told["objects"] == {"copied": 0, "present": 0, "resumed": 0}
    assert set(told) == {
        "commit", "step", "branch", "target", "snapshots", "objects", "bytes", "seconds",
    }  # fmt: skip


def test_does_a_snapshot_alone_move_no_branch(ask: Ask, run: Path, quick_path: Path) -> None:
    target = quick_path / "copy"
    told = ask("push", run, target, "--snapshot", "best", "--json").json
    assert told["commit"] is None
    assert told["snapshots"]["best"]["step"] == 1
    with shardb.open(target) as copied:
        assert copied.branches() == {}
    told = ask("push", run, target, "--snapshot", "best", "--ref", "main", "--json").json
    assert told["step"] == 2


def test_where_is_the_store_when_only_the_target_is_given(
    ask: Ask, run: Path, quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDB_STORE", str(run))
    assert ask("push", quick_path / "copy").code == 0
    monkeypatch.delenv("SHARDB_STORE")
    monkeypatch.chdir(run)
    assert ask("push", f"file://{quick_path}/place").code == 0
    assert ask("pull", quick_path / "copy").code == 0
    assert ask("pull", quick_path / "new", f"file://{quick_path}/place").code == 0
    with shardb.open(run) as ours, shardb.open(quick_path / "new") as theirs:
        assert contents(ours) == contents(theirs)


def test_does_the_log_of_the_copy_tell_every_step(ask: Ask, run: Path, quick_path: Path) -> None:
    ask("push", run, quick_path / "copy")
    steps = [row["step"] for row in ask("log", quick_path / "copy", "--json").json]
    assert steps == [0, 1, 2]


def test_does_the_log_tell_a_commit_once(ask: Ask, run: Path, quick_path: Path) -> None:
    """A snapshot brings a commit, a branch all steps up to it, and then the commit itself."""
    copy = quick_path / "copy"
    ask("push", run, copy, "--snapshot", "best")
    ask("push", run, copy, "--ref", "best")
    ask("push", run, copy)
    rows = ask("log", copy, "--json").json
    assert [row["step"] for row in rows] == [1, 0, 2]
    assert rows[0]["notes"] == ["snapshot best", "branch main"]


def test_is_a_mistake_one_line_and_the_right_code(ask: Ask, run: Path, quick_path: Path) -> None:
    new = quick_path / "new"
    check_refused(ask("push"), 2, "TARGET is missing")
    check_refused(ask("push", run, new, "more"), 2, "too many")
    check_refused(ask("push", "s3://b/x", run), 2, "the URL comes second")
    check_refused(ask("push", run, new, "--ref", "mian"), 4, "did you mean main")
    check_refused(ask("push", run, new, "--snapshot", "bets"), 4, "no snapshot")
    check_refused(ask("push", run, quick_path / "no" / "where"), 2, "parent")
    check_refused(ask("pull", new, quick_path / "nothing"), 4, "no store")
    check_refused(ask("publish", run, "s3://b/x"), 2, "durable store is on a path")
    check_refused(ask("clone", "s3://b/x", "s3://b/y"), 2, "to a path first")
    check_refused(ask("clone", run, new, "--snapshot", "bets"), 4, "no snapshot")
    assert not new.exists()


def test_is_a_place_with_other_files_refused(ask: Ask, run: Path, quick_path: Path) -> None:
    (quick_path / "photos").mkdir()
    (quick_path / "photos" / "cat.jpg").write_text("")
    check_refused(ask("clone", run, quick_path / "photos"), 2, "not empty")


def test_what_does_clone_say(ask: Ask, run: Path, quick_path: Path) -> None:
    done = ask("clone", run, quick_path / "copy")
    assert "branch main at step 2" in done.out
    assert "snapshot best pins step 1" in done.out
    told = ask("clone", run, f"file://{quick_path}/place", "--json").json
    assert told["branches"]["main"]["step"] == 2
    assert told["snapshots"]["best"]["step"] == 1


def test_does_clone_to_a_url_call_nothing_interrupted(
    ask: Ask, run: Path, quick_path: Path
) -> None:
    """The branch's commit finds what its snapshot has just brought; nothing was there before."""
    done = ask("clone", run, f"file://{quick_path}/far")
    assert done.code == 0
    assert "were there" not in done.out
    assert "interrupted" not in done.out


def test_does_the_remedy_for_damage_behind_a_url_work(
    ask: Ask, run: Path, quick_path: Path
) -> None:
    url, copy = f"file://{quick_path}/far", quick_path / "copy"
    assert ask("push", run, url).code == 0
    damaged = max((quick_path / "far" / "objects").iterdir(), key=lambda p: p.stat().st_size)
    damaged.write_bytes(bytes(damaged.stat().st_size))
    check_refused(ask("pull", copy, url), 3, "Delete it, and push the commit again")
    damaged.unlink()
    assert ask("push", run, url, "--branch", "again").code == 0
    assert ask("pull", copy, url).code == 0


def test_does_publish_copy_the_newest_commit(ask: Ask, run: Path, quick_path: Path) -> None:
    told = ask("publish", run, quick_path / "durable", "--json").json
    assert (told["step"], told["branch"]) == (2, "main")
    check_refused(ask("publish", run, quick_path / "durable", "--branch", "x"), 4, "'x'")


def test_does_publish_follow_a_run(run: Path, quick_path: Path) -> None:
    durable = quick_path / "durable"
    command = [sys.executable, "-c", PROGRAM, "publish", str(run), str(durable), "--follow"]
    process = subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert "step 2" in process.stdout.readline()
        with shardb.open(run) as store:
            commit(store, 3, size=3000)
        assert "step 3" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
    finally:
        process.kill()
        process.communicate()
    with shardb.open(durable) as store:
        assert store.durable_step() == 3


def test_what_is_shown_while_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    counts = Counts(objects_total=4, objects_done=1, bytes_total=400_000_000, bytes_done=10**8)
    assert progress_text(counts, 2.0) == (
        "copied 1 of 4 objects, 100 MB of 400 MB, 50 MB/s, 6.0 s left"
    )
    with TransferDisplay() as display:
        display.tally.expect(1, 10)
    assert capsys.readouterr().err == ""  # too early for a line, and no terminal


def test_is_progress_rewritten_on_a_terminal(run: Path, quick_path: Path) -> None:
    """On a pseudo-terminal the line is written in place and cleared at the end."""
    ours, theirs = os.openpty()
    code = "import shardb.cli.transfer_display as d; d.REWRITE_SECONDS = 0.0; " + PROGRAM
    command = [sys.executable, "-c", code, "push", str(run), str(quick_path / "copy")]
    done = subprocess.run(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=theirs, timeout=60, check=True
    )
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "\r\x1b[Kcopied " in shown
    assert shown.endswith("\r\x1b[K")
    assert b"copied " not in done.stdout.split(b":")[0]
