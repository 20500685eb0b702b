"""Is the command that a finding names a real one, and is the finding gone when it was typed?

A repair first says what it will do, and the command that does it: that one is typed then.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import shardb
from shardb.cli import run as run_command
from shardb.findings import KINDS, Finding
from tests.support import damage as d
from tests.support.damage import Known, check_repaired
from tests.support.small_stores import (
    commit_step,
    copy_store,
    fill_store,
    flip_bit,
    fsck,
    object_of,
)


def write(name: str, data: bytes = b"x") -> Callable[[Path], object]:
    return lambda root: (root / name).write_bytes(data)


def older_index(root: Path) -> None:
    kept = (root / "index/data.mdb").read_bytes()
    with shardb.open(root) as store:
        commit_step(store, store.resolve().step + 1)
    (root / "index/data.mdb").write_bytes(kept)


def break_chain(root: Path) -> None:
    """The last segment begins a chain of its own: one before it lost its end, to the byte."""
    closed = sorted((root / "wal").iterdir())[-2]
    closed.unlink()


def unreadable_segment(root: Path) -> None:
    path = sorted((root / "wal").iterdir())[0]
    path.unlink()
    path.mkdir()


def torn_end(root: Path) -> None:
    with d.last_segment(root).open("ab") as file:
        file.write(b"SDBW half a record")


def misnamed_spare(root: Path) -> None:
    (root / "spare" / "free.7.0123").write_bytes(b"not seven bytes")


def lock_as_directory(root: Path) -> None:
    (root / "locks/wal").unlink()
    (root / "locks/wal").mkdir()


def set_aside(root: Path) -> None:
    flip_bit(object_of(root, 2, "params/a"), 5000)
    assert run_command(["repair", str(root), "--yes"]) == 1


def foreign_index(root: Path) -> None:
    other = root.parent / "another"
    fill_store(other, range(9))
    shutil.rmtree(root / "index")
    (other / "index").rename(root / "index")


CASES: dict[str, Callable[[Path], object]] = {
    "format_damaged": lambda root: flip_bit(root / "FORMAT", 30),
    "format_foreign": d.foreign_format,
    "log_missing": break_chain,
    "log_damaged": d.spoil_record(0),
    "log_record_garbled": d.garble_last_record,
    "log_truncated": d.shorten_log(2),
    "log_unreadable": unreadable_segment,
    "log_torn_tail": torn_end,
    "index_missing": d.remove("index"),
    "index_behind": older_index,
    "index_unreadable": write("index/data.mdb"),
    "index_foreign": foreign_index,
    "index_differs": d.spoil_index_entry,
    "directory_missing": d.remove("leases"),
    "object_missing": d.remove_object(-1, "params/a"),
    "object_corrupt": d.spoil_object(-1, "params/a"),
    "object_unreferenced": write(f"objects/{'0' * 32}.safetensors"),
    "staged_leftover": write("spare/staged.main.0123"),
    "spare_misnamed": misnamed_spare,
    "partial_file": write("wal/0000000002.wal.partial"),
    "lease_of_dead_reader": write(f"leases/{'1' * 32}.0123456789abcdef"),
    "index_set_aside": write("index/unreadable-1.mdb"),
    "damaged_set_aside": set_aside,
    "place_taken": lock_as_directory,
    "shared_file": lambda root: (root.parent / "linked").hardlink_to(root / "index/data.mdb"),
}
# Nothing is to be done about these: no command is named.
WITHOUT = {"foreign_file", "log_acknowledged"}
# Made by hand in tests of their own.
ELSEWHERE = {
    *("log_chain_broken", "checkpoint_differs", "object_malformed", "object_duplicate"),
    "object_unreadable",  # what mends a disk is no command of the store's
    "directory_elsewhere",  # a second file system is needed; what is typed makes another store
}


def test_is_every_kind_of_finding_followed() -> None:
    assert CASES.keys() | WITHOUT | ELSEWHERE == KINDS.keys()


def follow(finding: Finding, capsys: pytest.CaptureFixture[str]) -> None:
    """Type what the finding says, and what that says."""
    assert finding.next_command is not None
    words = shlex.split(finding.next_command)
    if words[0] != "shardb":
        subprocess.run(words, check=True)
        return
    capsys.readouterr()
    code = run_command(words[1:])
    said = capsys.readouterr().out
    if words[1] == "repair":
        assert code == 1
        (again,) = [line for line in said.splitlines() if line.startswith("to do it: ")]
        words = shlex.split(again.removeprefix("to do it: "))
        assert words == ["shardb", "repair", words[2], "--yes"]
        assert run_command(words[1:]) in (0, 1)
    else:
        assert code == 0, said


@pytest.mark.parametrize("kind", CASES)
def test_is_a_finding_gone_when_its_command_was_typed(
    whole: Path,
    long: Path,
    root: Path,
    kind: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = long if kind.startswith("log") else whole
    known = Known.of(copy_store(source, tmp_path / "known"))
    spaced = root.parent / "a run"  # names with spaces can be typed, too
    run = copy_store(source, spaced)
    CASES[kind](run)
    findings = [finding for finding in fsck(run).findings if finding.kind == kind]
    assert findings, fsck(run).findings
    for finding in findings:
        if any(finding == still for still in fsck(run).findings):
            follow(finding, capsys)
    assert kind not in [finding.kind for finding in fsck(run).findings]
    if kind != "index_behind":
        check_repaired(run, known)
    shutil.rmtree(spaced)
