"""Does every verb have its help, exit codes, one line for an error, and the right store?"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardb
from shardb.cli import VERBS
from shardb.cli.fsck import _seconds
from shardb.cli.info import describe
from shardb.cli.printing import in_bytes, number, plain
from shardb.errors import EXIT_CODES, UsageError
from tests.support.commands import PROGRAM, REPOSITORY, Ask, check_refused
from tests.support.small_stores import (
    SHARDS,
    commit_step,
    copy_store,
    fill_store,
)
from tests.support.stores import Medium

# Verbs that need nothing but the store.
LOOKING = ("info", "log", "ls", "show", "snapshots", "recover", "fsck", "gc")


pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> Path:
    """A copy of the store."""
    return copy_store(whole, tmp_path / "run")


# Every verb


@pytest.mark.parametrize("verb", VERBS)
def test_does_every_help_say_what_scripts_need(ask: Ask, verb: str) -> None:
    answer = ask(verb, "--help")
    assert answer.code == 0
    for code, meaning in EXIT_CODES.items():
        assert f"{code:>3}  {meaning}" in answer.out
    assert "Examples:\n" in answer.out
    assert f"  shardb {verb}" in answer.out
    assert "interrupt" in answer.out
    assert "--json" in answer.out


@pytest.mark.parametrize("verb", [*LOOKING, "snapshot"])
def test_is_no_store_told_by_every_verb(ask: Ask, tmp_path: Path, verb: str) -> None:
    more = ["name"] if verb == "snapshot" else []
    check_refused(ask(verb, tmp_path / "nowhere", *more), 4, "no store here")
    check_refused(ask(verb, *more), 4, "SHARDB_STORE")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("verb", LOOKING)
def test_does_every_verb_print_one_document(ask: Ask, store: Path, verb: str) -> None:
    answer = ask(verb, store, "--json")
    assert (answer.code, answer.err) == (0, "")
    assert answer.json is not None
    assert ask(verb, store).out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--bogus"],
        ["bogus"],
        [],
        ["log", "--limit", "0"],
        ["log", "--limit", "x"],
        ["show", "a", "b", "c"],
        ["fsck", "--budget", "soon"],
        ["snapshot", "--step", "x", "a"],
    ],
)
def test_is_a_mistyped_command_refused_in_one_line(
    ask: Ask, store: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDB_STORE", str(store))
    check_refused(ask(*arguments), 2)


def test_does_a_mistyped_flag_point_to_the_help_of_its_verb(ask: Ask, store: Path) -> None:
    check_refused(ask("log", store, "--branch", "main"), 2, "(see `shardb log --help`)")
    check_refused(ask("--bogus"), 2, "(see `shardb --help`)")


def test_does_the_version_print(ask: Ask) -> None:
    assert ask("--version").out == f"shardb {shardb.__version__}\n"


def test_is_an_interrupt_exit_code_130(
    ask: Ask, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardb.cli.fsck.check_store", interrupted)
    assert ask("fsck", store).code == 130


# Which store


def test_is_the_store_found_without_being_named(
    ask: Ask, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(store)
    assert ask("show", "--json").json["step"] == 6
    assert ask("show", "step-2", "--json").json["step"] == 2
    assert ask("show", ".", "step-2", "--json").json["step"] == 2
    assert ask("snapshot", "step-5").code == 0
    monkeypatch.chdir(store.parent)
    monkeypatch.setenv("SHARDB_STORE", str(store))
    assert ask("show", "step-5", "--json").json["snapshots"] == ["step-5"]
    assert ask("show", "run", "step-2", "--json").json["step"] == 2


def test_does_the_variable_win_over_the_current_directory(
    ask: Ask, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_store(tmp_path / "other", range(2))
    monkeypatch.chdir(store)
    monkeypatch.setenv("SHARDB_STORE", str(tmp_path / "other"))
    assert ask("show", "--json").json["step"] == 1


# init, info, ls


def test_does_init_make_a_store_once(ask: Ask, tmp_path: Path) -> None:
    first = ask("init", tmp_path / "new", "--json").json
    assert first["commits"] == 0
    with shardb.open(tmp_path / "new") as opened:
        commit_step(opened, 1)
    again = ask("init", tmp_path / "new")
    assert (again.code, "step 1" in again.out) == (0, True)
    check_refused(ask("init", tmp_path / "a" / "b"), 2)


def test_does_info_name_writers_readers_and_sizes(ask: Ask, store: Path) -> None:
    with shardb.open(store) as opened, opened.begin(), opened.at(step=2):
        told = ask("info", store, "--json").json
        text = ask("info", store).out
    assert told["branches"]["main"]["step"] == told["branches"]["main"]["durable_step"] == 6
    assert told["branches"]["main"]["writer"]["pid"] == told["leases"][0]["pid"]
    assert told["snapshots"] == {"step-2": {"step": 2, "commit": told["leases"][0]["commit"]}}
    assert told["retained_steps"] == [2, 5, 6]
    assert told["policy"]["keep_last"] == 2
    assert told["bytes"]["logical"] > 0
    assert "written by process" in text


@pytest.mark.parametrize(("medium", "durable"), [("disk", 6), ("memory:tmpfs", 0)])
def test_does_info_call_no_step_durable_that_is_only_in_memory(
    store: Path, medium: str, durable: int
) -> None:
    with shardb.open(store, files=Medium(medium)) as opened:
        told = describe(opened)
    assert told["branches"]["main"]["step"] == 6
    assert told["branches"]["main"]["durable_step"] == durable


def test_is_a_reader_that_stops_reading_no_finding(store: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", PROGRAM, "log", str(store), "--json"]
    ended = subprocess.run(
        command, cwd=REPOSITORY, stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_does_ls_list_shards_and_tensors(ask: Ask, store: Path) -> None:
    listed = ask("ls", store, "step-2", "--json").json
    assert [shard["name"] for shard in listed] == sorted(["meta/recipe", *SHARDS])
    assert "tensors" not in listed[0]
    tensors = ask("ls", store, "step-2", "--tensors", "--json").json
    assert tensors[-1]["tensors"] == {"w": {"dtype": "F32", "shape": [1500]}}
    assert "[1500]" in ask("ls", store, "--tensors").out


# Small parts


@pytest.mark.parametrize(
    ("text", "seconds"), [("60s", 60), ("1.5m", 90), ("2h", 7200), ("7", 7), ("0s", 0)]
)
def test_is_a_time_read(text: str, seconds: float) -> None:
    assert _seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1s", "1d", "1 s"])
def test_is_no_time_refused(text: str) -> None:
    with pytest.raises(UsageError):
        _seconds(text)


def test_are_numbers_readable() -> None:
    assert [in_bytes(n) for n in (0, 999, 1000, 123456, 1.5e9, 2e15)] == [
        "0 B",
        "999 B",
        "1 kB",
        "123 kB",
        "1.5 GB",
        "2,000 TB",
    ]
    assert [number(v) for v in (1.0, 1234, None, "x", True)] == ["1.0000", "1,234", "", "", ""]
    assert plain({"a": [math.nan, b"\x00"], 1: (2,)}) == {"a": [None, "00"], "1": [2]}
