"""Something lies where a file of the store should be: is that named, with what to do about it?"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import shardb
from shardb.cli import run as run_command
from shardb.errors import (
    CorruptionError,
    FormatError,
    LogTruncatedError,
    ShardbError,
    StorageFailedError,
)
from shardb.filesystem import RealFileSystem
from shardb.findings import Finding
from shardb.fsck import check_store
from shardb.repair import repair
from shardb.repair_sources import StoreFiles
from tests.support.damage_store import KINDS, Specimen, commit_step, held

LAST_SEGMENT = "the last segment"


@pytest.fixture
def run(specimen: Specimen, scratch: Path) -> Path:
    """A copy of the store."""
    return Path(shutil.copytree(specimen.root, scratch / "run"))


def replace(path: Path) -> None:
    """A directory for a file, a file for a directory."""
    if path.is_dir():
        shutil.rmtree(path)
        path.write_bytes(b"x")
    else:
        path.unlink()
        path.mkdir()


def place(run: Path, name: str) -> Path:
    """Where something is put in the way."""
    return max(run.glob("wal/*.wal")) if name == LAST_SEGMENT else run / name


@pytest.mark.parametrize("name", [LAST_SEGMENT, "locks/wal", "locks/index", "spare"])
def test_is_what_is_in_the_way_named(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = place(run, name)
    replace(taken)
    with pytest.raises(ShardbError, match="move it away, put back what was there") as caught:
        shardb.open(run)
    assert str(taken) in str(caught.value)
    assert run_command(["gc", str(run)]) == caught.value.exit_code
    assert "move it away" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["locks/wal", "locks/index", "spare"])
def test_does_the_store_go_on_when_it_was_moved_away(run: Path, name: str) -> None:
    replace(run / name)
    (run / name).rename(run.parent / "moved")
    with shardb.open(run) as store:
        head = store.resolve().step
        assert commit_step(store, head + 1).step == head + 1


def test_is_a_moved_segment_still_missed(run: Path) -> None:
    """What was there must be put back: the store does not begin anew without it."""
    taken = place(run, LAST_SEGMENT)
    replace(taken)
    taken.rmdir()
    with pytest.raises(LogTruncatedError):
        shardb.open(run)


@pytest.mark.parametrize("verb", [["fsck"], ["gc"], ["repair"], ["recover"], ["show"], ["info"]])
def test_is_a_url_refused_by_verbs_of_directories(
    run: Path, verb: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{run}"
    more = ["main"] if verb == ["show"] else []
    assert run_command([*verb, url, *more]) == 2
    assert f"shardb clone {url} DIRECTORY" in capsys.readouterr().err


# Where something may lie, less what is damage: FORMAT, objects, segments that are directories.
PLACES = {
    "a directory": ("locks/wal", "locks/index", "locks/branch-main", "index/data.mdb",
                    "index/lock.mdb", "reserve", "spare file", "lease", "unfinished file",
                    "logs/steps.jsonl"),
    "a file": ("spare", "leases", "locks", "index", "logs"),
    "dangling": ("locks/wal", "locks/branch-main", "index/data.mdb", "index/lock.mdb", "reserve",
                 "lease", "spare", "leases", "locks", "index", "logs", "logs/steps.jsonl"),
    "loop": ("locks/wal", "index/data.mdb", "lease", "spare file", "spare"),
}  # fmt: skip
NEEDED = ("wal", "objects", LAST_SEGMENT)


def put(taken: Path, what: str) -> None:
    """Lay something in the place of a file or directory."""
    if taken.is_dir():
        shutil.rmtree(taken)
    taken.unlink(missing_ok=True)
    if what == "a directory":
        taken.mkdir()
    elif what == "a file":
        taken.write_bytes(b"x")
    else:
        taken.symlink_to(taken.name if what == "loop" else "/nonexistent/volume")


def found_at(run: Path, taken: Path) -> list[Finding]:
    report = check_store(RealFileSystem(), str(run))
    return [f for f in report.findings if f.severity == "error" and f.path == str(taken)]


@pytest.mark.parametrize(
    ("what", "name"), [(what, name) for what, names in PLACES.items() for name in names]
)
def test_does_a_repair_move_away_what_the_store_can_do_without(
    specimen: Specimen, run: Path, what: str, name: str
) -> None:
    taken = run / (specimen.files(name)[0] if name in {*KINDS} - {"index"} else name)
    put(taken, what)
    [finding] = found_at(run, taken)
    assert finding.kind == "place_taken"
    assert finding.found == (what if what.startswith("a ") else "a link that leads nowhere")
    planned = repair(str(run))
    assert [action.what for action in planned.plan.actions] == ["place_clear"]
    assert found_at(run, taken), "nothing was done yet"
    outcome = repair(str(run), yes=True)
    assert outcome.remaining == ()
    assert not outcome.plan.loses
    assert list(run.glob("damaged-*")), "it is kept"
    with shardb.open(run) as store:
        assert held(store) == specimen.held


@pytest.mark.parametrize("name", NEEDED)
@pytest.mark.parametrize("what", ["dangling", "loop"])
def test_is_nothing_given_up_for_a_disk_that_is_not_mounted(
    run: Path, name: str, what: str
) -> None:
    taken = place(run, name)
    away = taken.rename(run.parent / "away")
    put(taken, what)
    [finding, *_] = found_at(run, taken)
    assert "put it back" in str(finding.expected)
    with pytest.raises(CorruptionError, match="is a disk not mounted") as caught:
        repair(str(run), yes=True)
    assert caught.value.path == str(taken)
    taken.unlink()
    away.rename(taken)
    assert repair(str(run), yes=True).plan.is_empty


@pytest.mark.parametrize("what", ["dangling", "loop"])
def test_is_a_link_instead_of_format_named_and_replaced(
    specimen: Specimen, run: Path, what: str
) -> None:
    put(run / "FORMAT", what)
    with pytest.raises(FormatError, match="a link that leads nowhere"):
        shardb.open(run)
    assert [finding.kind for finding in found_at(run, run / "FORMAT")] == ["format_damaged"]
    assert repair(str(run), yes=True).remaining == ()
    assert (run / "FORMAT").is_file()
    with shardb.open(run) as store:
        assert held(store) == specimen.held


@pytest.mark.parametrize("name", ["locks/wal", "spare", "index/data.mdb"])
def test_is_a_link_that_leads_nowhere_named_by_the_error(run: Path, name: str) -> None:
    put(run / name, "dangling")
    with pytest.raises(ShardbError, match=f"{name} is a link that leads nowhere; bring back"):
        shardb.open(run)


def test_is_an_object_that_is_a_link_restored(specimen: Specimen, run: Path) -> None:
    name = specimen.files("object")[0]
    put(run / name, "dangling")
    copy = StoreFiles(RealFileSystem(), str(specimen.root))
    assert repair(str(run), yes=True, source=copy).remaining == ()
    with shardb.open(run) as store:
        assert held(store) == specimen.held


def test_is_a_place_below_a_file_refused(scratch: Path) -> None:
    (scratch / "file").write_bytes(b"x")
    with pytest.raises(ShardbError, match="a file, not a store"):
        shardb.open(scratch / "file" / "store")
    with pytest.raises(ShardbError, match=r"file/store: .*must be a directory") as caught:
        shardb.open(scratch / "file" / "store", create=True)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("what", ["dangling", "loop"])
def test_is_a_whole_store_told_of_whose_branch_lock_is_a_link(
    run: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    put(run / "locks/branch-main", what)
    for staged in run.glob("spare/staged.*"):
        staged.unlink()  # whose they are would be asked
    for verb in ("recover", "info"):
        assert run_command([verb, str(run)]) == 0, capsys.readouterr().err
    with shardb.open(run) as store, pytest.raises(ShardbError, match="a link that leads nowhere"):
        store.begin()


@pytest.mark.parametrize("what", ["dangling", "loop"])
def test_is_an_object_that_is_a_link_to_nothing_not_called_missing(
    specimen: Specimen, run: Path, what: str
) -> None:
    with shardb.open(run) as store, store.at() as view:
        name = next(iter(view.commit.shards))
        put(run / "objects" / f"{view.commit.shards[name].digest}.safetensors", what)
        with pytest.raises(StorageFailedError, match="a link that leads nowhere; bring back"):
            view.read(name)
