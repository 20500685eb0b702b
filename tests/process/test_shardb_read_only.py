"""Do the verbs that look work on a real file system that is mounted read-only?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import shardb
from tests.support.commands import Ask, shardb_command
from tests.support.read_only import mounted_read_only
from tests.support.small_stores import commit_step, fill_store, tree
from tests.support.store_workers import hold_writer, started

LOOKING = (
    ["info"],
    ["log"],
    ["log", "--plot"],
    ["ls", "--tensors"],
    ["show"],
    ["snapshots"],
    ["branches"],
    ["policy"],
    ["policy", "--keep-last", "1", "--dry-run"],
    ["cat", "params/a"],
    ["diff", "step-2"],
    ["du"],
    ["fsck"],
)


@pytest.fixture
def mounted(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A store that can be written at `root`, and its read-only sight."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fill_store(root, range(7), snapshots=(2,))
    with mounted_read_only(root, tmp_path / "mounted") as place:
        yield place


def test_do_the_looking_verbs_work_and_change_nothing(
    mounted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, ask = tree(mounted), Ask(capsys)
    for verb, *more in LOOKING:
        answer = ask(verb, mounted, *more)
        assert (answer.code, answer.err) == (0, ""), (verb, answer.err)
        assert answer.out
    assert tree(mounted) == before


@pytest.mark.parametrize("verb", [["gc"], ["snapshot", "x"]])
def test_are_the_changing_verbs_refused_in_one_line(mounted: Path, verb: list[str]) -> None:
    answer = shardb_command(verb[0], mounted, *verb[1:])
    assert answer.code == 7
    assert "Read-only file system" in answer.err
    assert answer.err.count("\n") == 1


@pytest.mark.parametrize("target", ["copy", "file:///{}/copy"])
def test_is_such_a_store_copied_from(mounted: Path, tmp_path: Path, target: str) -> None:
    """Nobody can change it through this mount, so no lease is needed; digests are checked."""
    before, end = tree(mounted), target.format(tmp_path) if ":" in target else tmp_path / target
    for command in (["clone", mounted, end], ["push", mounted, end, "--snapshot", "step-2"]):
        answer = shardb_command(command[0], *command[1:])
        assert answer.code == 0, answer.err
    answer = shardb_command("pull", tmp_path / "pulled", mounted if end == target else end)
    assert answer.code == 0, answer.err
    assert tree(mounted) == before
    right = shardb_command("show", mounted, "--json").json
    found = shardb_command("show", tmp_path / "pulled", "--json").json
    assert (found["commit"], found["shards"]) == (right["commit"], right["shards"])


@pytest.mark.parametrize("verb", [["recover"], ["pack", "step-2"]])
def test_do_changing_verbs_name_the_way_round(mounted: Path, verb: list[str]) -> None:
    answer = shardb_command(verb[0], mounted, *verb[1:])
    assert answer.code == 7
    assert "nothing can be changed through this mount" in answer.err
    assert "shardb clone" in answer.err


def test_are_a_writer_and_its_new_steps_seen(mounted: Path, root: Path) -> None:
    with started(hold_writer, root) as writer:
        assert writer.line() == "writing"
        info = shardb_command("info", mounted, "--json").json
        assert info["branches"]["main"]["writer"]["pid"] == writer.process.pid
    with shardb.open(root) as store:
        commit_step(store, 7)
    assert shardb_command("show", mounted, "--json").json["step"] == 7
