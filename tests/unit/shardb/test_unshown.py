"""Is a file that the storage only does not show, or not let go, called that, with what helps?"""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import shardb
from shardb.cli import run as run_command
from shardb.errors import StorageFailedError
from shardb.filesystem import RealFileSystem
from shardb.findings import Finding
from shardb.fsck import check_store
from shardb.fsck_objects import check_object
from shardb.gc import UNREFERENCED, collect_garbage
from shardb.read_only import open_to_look
from shardb.records import new_record
from shardb.repair import repair
from shardb.storage_errors import reason
from shardb.testing.operations import Fault
from shardb.testing.recording import RecordingFileSystem
from shardb.unshown import command_to_see
from tests.support.damage import last_segment
from tests.support.small_stores import fsck, object_of, only
from tests.support.stores import InterposedFiles

UNNEEDED = "0" * 32


def seen(run: Path, locked: Path) -> Finding:
    """Type what the one finding of a store says; it must be gone then."""
    finding = only(fsck(run))
    assert finding.path == str(locked)
    assert "nothing says that it is damaged" in (finding.found or "")
    assert finding.next_command is not None
    subprocess.run(shlex.split(finding.next_command), check=True)
    assert fsck(run).findings == []
    return finding


@pytest.mark.parametrize("step", [2, 6])
def test_is_an_object_made_readable_by_what_a_check_says(
    run: Path, nobody: None, step: int
) -> None:
    locked = object_of(run, step, "params/a")
    locked.chmod(0)
    assert seen(run, locked).kind == "object_unreadable"


def test_is_a_log_made_readable_by_what_a_check_says(run: Path, nobody: None) -> None:
    """Nobody has seen what is in it: nothing else is said to be missing."""
    last_segment(run).chmod(0)
    assert seen(run, last_segment(run)).kind == "log_unreadable"


@pytest.mark.parametrize("name", ["wal", "index", "index/data.mdb", "objects", "FORMAT"])
def test_has_what_may_not_be_read_one_exit_code(run: Path, nobody: None, name: str) -> None:
    (run / name).chmod(0)
    acts: list[Callable[[], object]] = [lambda: fsck(run), lambda: repair(str(run))]
    if name != "objects":  # they are needed when one is read
        acts += [lambda: open_to_look(str(run)), lambda: shardb.open(run)]
    for act in acts:
        with pytest.raises(StorageFailedError, match="run this as its owner, or chmod"):
            act()


@pytest.fixture
def loaded(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the verbs import when they are called, another user may not be able to read."""
    for verb in ("info", "log"):
        assert run_command([verb, str(run)]) == 0
    capsys.readouterr()


@pytest.mark.parametrize("name", ["", "wal", "locks", "objects", "leases"])
def test_is_a_directory_that_may_not_be_looked_into_no_damage(
    run: Path, loaded: None, nobody: None, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (run / name).chmod(0)
    for verb in ("info", "log"):
        if verb == "info" or name in ("", "wal", "locks"):  # a log is read without the others
            assert run_command([verb, str(run)]) == 7
            assert "chmod or chown it" in capsys.readouterr().err
    (run / name).chmod(0o700)


def test_is_a_log_of_which_nothing_is_shown_no_damaged_one(
    run: Path, loaded: None, nobody: None, capsys: pytest.CaptureFixture[str]
) -> None:
    segments = list((run / "wal").iterdir())
    for path in segments:
        path.chmod(0)
    assert run_command(["log", str(run)]) == 7
    said = capsys.readouterr()
    assert "chmod or chown it" in said.err
    assert not said.out


def test_is_a_log_that_is_not_shown_not_called_empty(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    segment = last_segment(run)
    segment.unlink()
    segment.mkdir()
    assert run_command(["log", str(run)]) == 1
    assert "no commit of it can be read" in capsys.readouterr().out


def test_is_a_check_ended_only_by_what_the_store_needs(run: Path, nobody: None) -> None:
    (run / "logs").mkdir(mode=0)
    assert fsck(run).findings == []
    (run / "FORMAT").chmod(0)
    with pytest.raises(StorageFailedError, match=r"FORMAT: cannot be read: .* or chmod"):
        fsck(run)


def test_is_a_foreign_file_given_to_the_owner_of_the_store(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give files away")
    locked = object_of(run, 6, "params/a")
    os.chown(run, 65534, 65534)
    ask = (RealFileSystem(), str(run), str(locked), errno.EACCES)
    assert command_to_see(*ask) == f"sudo -u '#65534' shardb fsck {run}", "root, on a network disk"
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert command_to_see(*ask) == f"sudo chown 65534 {locked}"


def test_is_the_owner_asked_where_a_link_leads_into_a_locked_place(run: Path, nobody: None) -> None:
    locked = object_of(run, 6, "params/a")
    pool = run / "pool"
    pool.mkdir()
    locked.rename(pool / "a")
    locked.symlink_to(pool / "a")
    pool.chmod(0)
    told = command_to_see(RealFileSystem(), str(run), str(locked), errno.EACCES)
    pool.chmod(0o755)
    assert told == f"sudo -u '#65534' shardb fsck {run}"


def failing(run: Path, step: int) -> RecordingFileSystem:
    """A disk that fails whenever one object is read."""
    name = object_of(run, step, "params/a").name
    fault = Fault(
        operation="pread_into", nth=1, error=errno.EIO, persistent=True, path_contains=name
    )
    return RecordingFileSystem(str(run), fault=fault)


def test_is_an_error_of_the_disk_called_that(run: Path) -> None:
    finding = only(check_store(failing(run, 6), str(run)))
    assert finding.kind == "object_unreadable"
    assert finding.next_command is None, "no command mends a disk, and repair would not"
    for word in ("the disk failed to read", "dmesg", "cable", "copy the disk"):
        assert word in (finding.found or "")


def test_does_an_error_of_the_disk_end_a_reader_in_order(run: Path) -> None:
    """A mapping of such a file would end the process with SIGBUS instead."""
    with shardb.open(run, files=failing(run, 6)) as store, store.at() as view:
        with pytest.raises(StorageFailedError, match="the disk failed to read"):
            view.read("params/a")
        assert view.read("params/b").digest == view.commit.shards["params/b"].digest
        entry = view.commit.shards["params/a"]
        with pytest.raises(StorageFailedError, match="copy the disk"):
            check_object(store.files, store.root, "params/a", entry)


def test_is_it_said_where_a_link_to_nothing_led(run: Path, tmp_path: Path) -> None:
    path = object_of(run, 6, "params/a")
    path.unlink()
    path.symlink_to(tmp_path / "pool")
    finding = only(fsck(run))
    assert finding.next_command == f"readlink {path}"


# What may not be changed


@pytest.fixture
def unneeded(run: Path) -> Path:
    path = run / "objects" / f"{UNNEEDED}.safetensors"
    path.write_bytes(bytes(100))
    return path


@pytest.fixture
def immutable(unneeded: Path) -> Iterator[Path]:
    """A file that even root may not remove."""
    made = subprocess.run(["chattr", "+i", unneeded], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"no file can be made immutable here: {made.stderr.decode().strip()}")
    yield unneeded
    subprocess.run(["chattr", "-i", unneeded], check=True)


def test_does_gc_name_an_immutable_file_and_remove_the_others(
    run: Path, immutable: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    partial = run / "objects/x.partial"
    partial.write_bytes(b"x")
    assert run_command(["gc", str(run)]) == 7
    said = capsys.readouterr().err
    assert f"{immutable} was made immutable" in said
    assert f"chattr -ia {immutable}" in said
    assert "or chmod" not in said
    assert immutable.exists()
    assert not partial.exists()
    assert not list((run / "spare").iterdir())


def refusing(name: str) -> InterposedFiles:
    """Files of which those with this name may not be removed."""

    def refuse(path: str) -> None:
        if name in path:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)

    return InterposedFiles("unlink", refuse)


def test_does_gc_go_on_without_what_may_not_be_removed(run: Path, unneeded: Path) -> None:
    litter = [run / "objects" / f"{letter}.partial" for letter in "abc"]
    for path in litter:
        path.write_bytes(b"x")
    collected = collect_garbage(str(run), files=refusing("b.partial"))
    assert [line.split(": not removed: ")[0] for line in collected.left] == [str(litter[1])]
    assert [path.exists() for path in litter] == [False, True, False]
    assert collected.to_json()["left"] == collected.left
    assert str(litter[1]) not in [item.path for item in collected.removed]
    assert UNREFERENCED in [item.why for item in collected.removed]


def test_are_many_files_that_stay_counted(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(7):
        (run / "objects" / f"{number}.partial").write_bytes(b"x")
    monkeypatch.setattr("shardb.gc.RealFileSystem", lambda: refusing(".partial"))
    assert run_command(["gc", str(run)]) == 7
    assert "and 2 more that may not be removed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "advice"),
    [(errno.EMFILE, "ulimit -n"), (errno.EFBIG, "ulimit -f"), (errno.EACCES, "chmod")],
)
def test_is_nobody_sent_to_look_for_what_cannot_have_landed(
    run: Path, code: int, advice: str
) -> None:
    files = RecordingFileSystem(str(run))
    operation = "pwrite" if code == errno.EFBIG else "open"
    fault = Fault(operation=operation, nth=1, error=code, path_contains=".wal")
    with shardb.open(run, files=files) as store, store.appender.exclusive("testing") as end:
        files._fault = fault
        with pytest.raises(StorageFailedError, match="nothing of it landed") as caught:
            store.appender.append_durably(end, new_record("gc", abandoned=[]))
    assert advice in str(caught.value)
    assert "reopen" not in str(caught.value)


def test_is_a_refusal_of_nobody_knows_what_told_as_one() -> None:
    assert "or chmod" in reason(RealFileSystem(), PermissionError(errno.EPERM, "no"))


def test_is_an_error_that_nobody_turned_told_as_the_others_are(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "link").symlink_to(run / "nowhere")

    def fail(code: int, path: Path) -> int:
        def act(*_: object, **__: object) -> None:
            raise OSError(code, os.strerror(code), str(path))

        monkeypatch.setattr("shardb.cli.gc.collect_garbage", act)
        return run_command(["gc", str(run)])

    codes = {errno.EIO: 7, errno.EACCES: 7, errno.ENOSPC: 6, errno.ENOENT: 4, errno.EBADMSG: 3}
    assert {code: fail(code, run / "file") for code in codes} == codes
    assert "or chmod" in capsys.readouterr().err
    assert fail(errno.ENOENT, run / "link") == 7
    assert "a link that leads nowhere; bring back" in capsys.readouterr().err


def test_is_an_index_that_may_not_be_changed_told_with_what_helps(run: Path, nobody: None) -> None:
    (run / "index/data.mdb").chmod(0o444)
    with pytest.raises(StorageFailedError, match=r"data.mdb: the index failed .* or chown") as said:
        shardb.open(run)
    assert "again" not in str(said.value)
