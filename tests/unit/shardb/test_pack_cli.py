"""Do `pack`, `unpack` and `du` keep their contracts?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shardb
from shardb import branching
from shardb.cli.progress import ObjectsLine
from shardb.pack_report import PackProgress
from shardb.pack_usage import usage
from tests.support.commands import Ask, check_refused
from tests.support.pack_stores import contents, digest_at, fill, stored
from tests.support.small_stores import copy_store


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed store with snapshots of steps 1, 3 and 5, whose head is at step 8."""
    root = tmp_path_factory.mktemp("whole") / "run"
    with shardb.open(root, create=True) as store:
        fill(store, range(9), snapshots=(1, 3, 5))
    return root


@pytest.fixture
def run(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it."""
    monkeypatch.delenv("SHARDB_STORE", raising=False)
    return copy_store(whole, tmp_path / "run")


def test_does_pack_say_what_it_did(run: Path, ask: Ask) -> None:
    answer = ask("pack", run)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("packed 6 objects of 3 steps: ")
    assert "left as they are: 1 in use by a branch" in answer.out
    assert ask("pack", run).out.startswith("nothing to pack\nleft as they are: 6 packed already")


def test_does_the_document_hold_what_was_promised(run: Path, ask: Ask) -> None:
    told = ask("pack", run, "--json").json
    assert {"objects", "skipped", "bytes", "packed_bytes", "freed_bytes", "seconds"} == set(told)
    keys = {"shard", "step", "digest", "bytes", "packed_bytes", "base", "base_step"}
    assert all(set(item) == keys for item in told["objects"])
    assert told["freed_bytes"] == told["bytes"] - told["packed_bytes"] > 0
    assert {item["digest"] for item in told["objects"]} == stored(run)["pack"]


def test_does_show_say_the_same_of_a_packed_snapshot(run: Path, ask: Ask) -> None:
    before = ask("show", run, "step-3", "--json").out
    ask("pack", run)
    assert ask("show", run, "step-3", "--json").out == before
    assert "weight" in ask("ls", run, "step-3", "--tensors").out


@pytest.mark.parametrize("flags", [(), ("--snapshots",)])
def test_are_all_snapshots_meant_without_a_ref(run: Path, ask: Ask, flags: tuple[str]) -> None:
    told = ask("pack", run, "--json", *flags).json
    assert {item["step"] for item in told["objects"]} == {1, 3, 5}


def test_is_the_store_found_as_by_other_verbs(
    run: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run)
    assert "1 step:" in ask("pack", "step-3").out
    assert "2 steps:" in ask("pack", "step-1", "step-5").out
    monkeypatch.chdir(run.parent)
    assert ask("unpack", run, "step-1", "step-5").out.startswith("unpacked 4 objects: ")
    monkeypatch.setenv("SHARDB_STORE", str(run))
    assert ask("unpack").out.startswith("unpacked 2 objects: ")
    assert stored(run)["pack"] == set()


def test_are_mistakes_told(run: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    check_refused(ask("pack", run, "step-4"), 4, "step 4 is not retained")
    check_refused(ask("pack", run, "main"), 2, "no snapshot keeps")
    check_refused(ask("pack", run, "step-1", "--snapshots"), 2, "--snapshots")
    check_refused(ask("pack", run, "--level", "20"), 2, "from 1 to 19")
    check_refused(ask("unpack", run, "main"), 2, "no snapshot keeps")
    monkeypatch.chdir(run.parent)
    check_refused(ask("pack", "step-1", "step-3"), 4, "there is no store here")
    check_refused(ask("du", run / "wal"), 4, "no store")


def test_is_a_damaged_packed_object_told_by_its_name(run: Path, ask: Ask) -> None:
    ask("pack", run)
    with shardb.open(run) as store:
        path = run / "objects" / f"{digest_at(store, 'step-3')}.pack"
    path.write_bytes(b"no packed file")
    check_refused(ask("unpack", run), 3, path.name)
    answer = ask("fsck", run, "--json")
    assert answer.code == 1
    assert [finding["path"] for finding in answer.json["findings"]] == [str(path)]


def test_does_du_count_what_is_shared_and_what_is_saved(run: Path, ask: Ask) -> None:
    before = ask("du", run, "--json").json
    names = {item["name"]: item for item in before["names"]}
    assert set(names) == {"main", "step-1", "step-3", "step-5"}
    assert names["main"]["steps"] == [7, 8]
    assert names["step-1"]["saved_bytes"] == before["saved_bytes"] == 0
    recipe_bytes = names["step-1"]["stored_bytes"] - names["step-1"]["unique_bytes"]
    assert 0 < recipe_bytes < 5000  # shared by all
    assert before["stored_bytes"] == sum(p.stat().st_size for p in (run / "objects").iterdir())
    packed = ask("pack", run, "--json").json
    after = ask("du", run, "--json").json
    names = {item["name"]: item for item in after["names"]}
    assert after["saved_bytes"] == packed["freed_bytes"]
    assert after["stored_bytes"] == sum(p.stat().st_size for p in (run / "objects").iterdir())
    assert after["whole_bytes"] == before["stored_bytes"]
    # Step 1 is the base of step 3, which is the base of step 5: without step 1 nothing is free.
    assert names["step-1"]["unique_bytes"] == 0
    assert names["step-5"]["objects"] == 1 + 3 * 2
    assert names["step-5"]["unique_bytes"] > 0


def test_is_what_du_calls_unique_free_when_the_name_is_gone(run: Path, ask: Ask) -> None:
    ask("pack", run)
    with shardb.open(run) as store:
        told = {item.name: item for item in store.index.read(usage).names}["step-5"]
        before = sum(p.stat().st_size for p in (run / "objects").iterdir())
        branching.delete_snapshot(store, "step-5")
    after = sum(p.stat().st_size for p in (run / "objects").iterdir())
    assert before - after == told.unique_bytes > 0


def test_is_du_a_table_for_people(run: Path, ask: Ask) -> None:
    ask("pack", run)
    lines = ask("du", run).out.splitlines()
    assert lines[0].split() == ["name", "kind", "steps", "holds", "takes", "alone", "saved"]
    assert lines[1].split()[:5] == ["main", "branch", "7", "to", "8"]
    assert lines[-1].startswith("11 objects, 6 of them packed, take ")


def test_is_du_of_a_store_without_commits_empty(tmp_path: Path, ask: Ask) -> None:
    ask("init", tmp_path / "new")
    assert ask("du", tmp_path / "new", "--json").json["names"] == []
    assert ask("pack", tmp_path / "new").out == "nothing to pack\n"
    assert json.loads(ask("unpack", tmp_path / "new", "--json").out)["objects"] == 0


def test_is_progress_shown_on_a_terminal_and_cleared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = PackProgress(objects=1, objects_total=2, bytes=50, bytes_total=100, seconds=1.0)
    with ObjectsLine("packed") as line:
        line._written_at -= 1
        line.show_objects(progress)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with ObjectsLine("packed") as line:
        line.show_objects(progress)  # not at once: what ends in a moment shows none
        line._written_at -= 1
        line.show_objects(progress)
        line.show_objects(progress)
    shown = capsys.readouterr().err
    assert shown.count("packed 1 of 2 objects, 50 B of 100 B, 50 B/s, 1.0 s left") == 1
    assert shown.endswith("\r\x1b[K")


def test_is_everything_read_as_before(run: Path, ask: Ask) -> None:
    with shardb.open(run) as store:
        before = contents(store)
    ask("pack", run)
    with shardb.open(run) as store:
        assert contents(store) == before
