"""Does each verb keep its contract: keys, exit codes, one line for an error, the right store?"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardb
from shardb.branching import rewind
from shardb.cli import VERBS, run
from shardb.cli.fsck import _seconds
from shardb.cli.printing import in_bytes, number, plain
from shardb.errors import EXIT_CODES, UsageError
from tests.support.small_stores import (
    SHARDS,
    commit_step,
    copy_store,
    fill_store,
    flip_bit,
    object_of,
    tree,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with steps 0 to 6, of which 2, 5 and 6 are retained."""
    root = tmp_path_factory.mktemp("whole") / "run"
    fill_store(root, range(7), snapshots=(2,))
    return root


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> Path:
    """A copy of the store."""
    return copy_store(whole, tmp_path / "run")


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No store in the environment, the current directory or the cache of checks."""
    monkeypatch.delenv("SHARDB_STORE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


class Answer:
    """What a command answered."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    @property
    def json(self) -> Any:
        """The document on standard output."""
        return json.loads(self.out, parse_constant=pytest.fail)


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command in this process."""

    def asked(*arguments: object) -> Answer:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return asked


def check_refused(answer: Answer, code: int, *words: str) -> None:
    """One line on standard error, the right code, no traceback."""
    assert answer.code == code, answer.err
    assert answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1
    for word in words:
        assert word in answer.err


# Every verb


@pytest.mark.parametrize("verb", VERBS)
def test_does_every_help_say_what_scripts_need(ask: Any, verb: str) -> None:
    answer = ask(verb, "--help")
    assert answer.code == 0
    for code, meaning in EXIT_CODES.items():
        assert f"{code:>3}  {meaning}" in answer.out
    assert "Examples:\n" in answer.out
    assert f"  shardb {verb}" in answer.out
    assert "interrupt" in answer.out
    assert "--json" in answer.out


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "init"])
def test_is_no_store_told_by_every_verb(ask: Any, tmp_path: Path, verb: str) -> None:
    more = ["name"] if verb == "snapshot" else []
    check_refused(ask(verb, tmp_path / "nowhere", *more), 4, "no store here")
    check_refused(ask(verb, *more), 4, "SHARDB_STORE")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ("init", "snapshot")])
def test_does_every_verb_print_one_document(ask: Any, store: Path, verb: str) -> None:
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
    ask: Any, store: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDB_STORE", str(store))
    check_refused(ask(*arguments), 2)


def test_does_the_version_print(ask: Any) -> None:
    assert ask("--version").out == f"shardb {shardb.__version__}\n"


def test_is_an_interrupt_exit_code_130(
    ask: Any, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardb.cli.fsck.check_store", interrupted)
    assert ask("fsck", store).code == 130


# Which store


def test_is_the_store_found_without_being_named(
    ask: Any, store: Path, monkeypatch: pytest.MonkeyPatch
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
    ask: Any, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_store(tmp_path / "other", range(2))
    monkeypatch.chdir(store)
    monkeypatch.setenv("SHARDB_STORE", str(tmp_path / "other"))
    assert ask("show", "--json").json["step"] == 1


# init, info, ls


def test_does_init_make_a_store_once(ask: Any, tmp_path: Path) -> None:
    first = ask("init", tmp_path / "new", "--json").json
    assert first["commits"] == 0
    with shardb.open(tmp_path / "new") as opened:
        commit_step(opened, 1)
    again = ask("init", tmp_path / "new")
    assert (again.code, "step 1" in again.out) == (0, True)
    check_refused(ask("init", tmp_path / "a" / "b"), 2)


def test_does_info_name_writers_readers_and_sizes(ask: Any, store: Path) -> None:
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


def test_does_ls_list_shards_and_tensors(ask: Any, store: Path) -> None:
    listed = ask("ls", store, "step-2", "--json").json
    assert [shard["name"] for shard in listed] == sorted(["meta/recipe", *SHARDS])
    assert "tensors" not in listed[0]
    tensors = ask("ls", store, "step-2", "--tensors", "--json").json
    assert tensors[-1]["tensors"] == {"w": {"dtype": "F32", "shape": [1500]}}
    assert "[1500]" in ask("ls", store, "--tensors").out


# show


def test_does_show_have_the_promised_keys(ask: Any, store: Path) -> None:
    told = ask("show", store, "step-2", "--json").json
    assert {"commit", "branch", "step", "metrics", "shards"} <= set(told)
    assert {"parent", "time", "state", "statistics", "snapshots"} <= set(told)
    assert (told["branch"], told["step"], told["snapshots"]) == ("main", 2, ["step-2"])
    assert told["metrics"] == {"loss": 1 / 3}
    assert set(told["shards"]["params/a"]) == {"digest", "bytes", "step", "trainable"}
    path = store / "objects" / f"{told['shards']['params/a']['digest']}.safetensors"
    assert path.stat().st_size == told["shards"]["params/a"]["bytes"]
    assert told["shards"]["meta/recipe"]["step"] == 0
    assert told["shards"]["meta/recipe"]["trainable"] is False
    assert ask("show", store, told["commit"][:20], "--json").json == told


def test_does_a_store_without_commits_show_nothing(ask: Any, tmp_path: Path) -> None:
    ask("init", tmp_path / "new")
    check_refused(ask("show", tmp_path / "new"), 4, "no commit yet")
    assert ask("log", tmp_path / "new", "--json").json == []
    assert ask("fsck", tmp_path / "new").code == 0


def test_is_what_json_cannot_hold_null(ask: Any, tmp_path: Path) -> None:
    metrics = {"loss": math.nan, "up": math.inf, "down": -math.inf, "raw": b"\x01\xff"}
    with shardb.open(tmp_path / "new", create=True) as opened, opened.begin() as txn:
        txn.write("p", {"w": np.zeros(1, dtype=np.float32)})
        txn.commit(step=1, metrics=metrics, state={"list": [math.nan, (1, 2)]})
    nulls = {"loss": None, "up": None, "down": None, "raw": "01ff"}
    assert ask("show", tmp_path / "new", "--json").json["metrics"] == nulls
    assert ask("show", tmp_path / "new", "--json").json["state"] == {"list": [None, [1, 2]]}
    assert ask("log", tmp_path / "new", "--json").json[0]["metrics"] == nulls
    assert ask("show", tmp_path / "new").code == 0
    assert ask("log", tmp_path / "new").code == 0


def test_is_a_near_name_proposed(ask: Any, store: Path) -> None:
    check_refused(ask("show", store, "step2"), 4, "step-2")
    check_refused(ask("show", store, "step-3"), 4, "2, 5, 6")


# log


def test_does_the_log_tell_every_step(ask: Any, store: Path) -> None:
    rows = ask("log", store, "--json").json
    assert [row["step"] for row in rows] == list(range(7))
    assert {"commit", "step", "time", "metrics", "branch"} <= set(rows[0])
    assert [row["metrics"]["loss"] for row in rows] == [1 / (step + 1) for step in range(7)]
    assert rows[2]["notes"] == ["snapshot step-2"]
    assert [row["step"] for row in ask("log", store, "--limit", 2, "--json").json] == [5, 6]
    text = ask("log", store).out.splitlines()
    assert len(text) == 8
    assert "0.5000" in text[2]


def test_does_the_log_read_closed_segments_and_name_damage(ask: Any, tmp_path: Path) -> None:
    root = tmp_path / "long"
    fill_store(root, range(12), segment_bytes=3000)
    assert [row["step"] for row in ask("log", root, "--json").json] == list(range(12))
    closed = min((root / "wal").iterdir())
    flip_bit(closed, closed.stat().st_size // 2)
    answer = ask("log", root, "--json")
    assert answer.code == 1
    assert str(closed) in answer.err
    steps = [row["step"] for row in answer.json]
    assert steps[-1] == 11
    assert steps == sorted(set(steps))
    assert 0 < len(steps) < 12


def test_does_the_log_open_and_change_nothing(ask: Any, store: Path) -> None:
    before = tree(store)
    ask("log", store)
    assert tree(store) == before
    (store / "wal/0000000001.wal").write_bytes((store / "wal/0000000001.wal").read_bytes()[:-9])
    assert len(ask("log", store, "--json").json) == 6


def test_does_the_log_tell_rewinds_and_changes(ask: Any, store: Path) -> None:
    with shardb.open(store) as opened:
        rewind(opened, "main", "step-5")
        with opened.begin() as txn:
            for name in SHARDS:
                txn.stage(name, like=txn.read(name)).array("w")[:] = 1
            changes = {"learning_rate": [0.1, 0.2]}
            txn.commit(step=6, metrics={"recipe_changes": changes})
    rows = ask("log", store, "--json").json
    assert [row["step"] for row in rows[-2:]] == [6, 6]
    assert "rewound main" in rows[-2]["notes"][0]
    assert rows[-1]["notes"] == ["learning_rate 0.1 -> 0.2"]


# snapshot


def test_does_a_snapshot_pin_the_step_of_its_name(ask: Any, store: Path) -> None:
    told = ask("snapshot", store, "step-5", "--json").json
    assert (told["step"], told["created"]) == (5, True)
    again = ask("snapshot", store, "step-5")
    assert (again.code, "was there already" in again.out) == (0, True)
    check_refused(ask("snapshot", store, "step-3"), 4, "2, 5, 6")
    check_refused(ask("snapshot", store, "step-6", "--step", 5), 2)


def test_does_a_free_name_pin_the_newest_or_what_is_said(ask: Any, store: Path) -> None:
    assert "step 6" in ask("snapshot", store, "now").out
    assert ask("snapshot", store, "best", "--step", 5, "--json").json["step"] == 5
    assert ask("snapshot", store, "old", "--ref", "step-2", "--json").json["step"] == 2
    check_refused(ask("snapshot", store, "x", "--step", 5, "--ref", "main"), 2)
    check_refused(ask("snapshot", store, "bad name"), 2)
    check_refused(ask("snapshot", store), 2, "NAME")
    names = [row["snapshot"] for row in ask("snapshots", store, "--json").json]
    assert names == ["old", "step-2", "best", "now"]


def test_is_a_taken_name_a_conflict_only_for_another_commit(ask: Any, store: Path) -> None:
    ask("snapshot", store, "best", "--step", 5)
    assert ask("snapshot", store, "best", "--step", 5).code == 0
    check_refused(ask("snapshot", store, "best", "--step", 6), 5, "step 5")
    check_refused(ask("snapshot", store, "best"), 5)


def test_does_only_verify_read_the_objects(ask: Any, store: Path) -> None:
    flip_bit(object_of(store, 5, "params/a"), 5000)
    check_refused(ask("snapshot", store, "a", "--step", 5, "--verify"), 3, "params/a")
    assert len(ask("snapshots", store, "--json").json) == 1
    assert ask("snapshot", store, "a", "--step", 5).code == 0
    assert ask("snapshot", store, "b", "--step", 6, "--verify").code == 0


# recover


def test_does_recover_name_what_it_cut(ask: Any, store: Path) -> None:
    with (store / "wal/0000000001.wal").open("ab") as file:
        file.write(b"SDBW half a record")
    told = ask("recover", store, "--json").json
    assert set(told) == {"opened", "dropped", "rebuilt", "needs", "warnings"}
    assert told["opened"]["main"]["step"] == 6
    assert set(told["dropped"][0]) == {"what", "path", "why"}
    assert ask("recover", store, "--json").json["dropped"] == []


def test_does_recover_say_what_a_refused_store_needs(ask: Any, store: Path) -> None:
    path = store / "wal/0000000001.wal"
    path.write_bytes(path.read_bytes()[:-9])
    before = tree(store / "wal")
    answer = ask("recover", store, "--json")
    check_refused(answer, 3, str(path))
    assert answer.json["needs"] == f"shardb fsck {store}"
    assert answer.json["error"]["kind"] == "log_truncated"
    assert tree(store / "wal") == before


def test_does_recover_rebuild_the_index(ask: Any, store: Path) -> None:
    (store / "index/data.mdb").unlink()
    told = ask("recover", store, "--json").json
    assert told["rebuilt"][0]["what"] == "index"


# fsck, gc


def test_do_only_errors_make_fsck_exit_1(ask: Any, store: Path) -> None:
    (store / "objects" / f"{'0' * 32}.safetensors").write_bytes(b"x")
    answer = ask("fsck", store, "--json")
    assert (answer.code, answer.json["findings"][0]["severity"]) == (0, "info")
    flip_bit(object_of(store, 2, "params/a"), 5000)
    answer = ask("fsck", store, "--json")
    assert answer.code == 1
    assert {"findings", "objects_checked", "bytes_checked"} <= set(answer.json)
    text = ask("fsck", store).out
    assert "error: object_corrupt: objects/" in text
    assert "hits shards params/a; steps 2; snapshots step-2" in text
    assert "nearest intact step: 5" in text


def test_does_a_budget_go_on_where_the_last_one_ended(
    ask: Any, store: Path, tmp_path: Path
) -> None:
    before = tree(store)
    checked = [ask("fsck", store, "--budget", "0s", "--json").json["objects_checked"]]
    while len(verified(tmp_path)) < 10:
        known = len(verified(tmp_path))
        checked.append(ask("fsck", store, "--budget", "0s", "--json").json["objects_checked"])
        assert len(verified(tmp_path)) > known
    assert sum(checked) == 10
    assert tree(store) == before


def verified(tmp_path: Path) -> dict[str, float]:
    """The times that are kept in the user's cache."""
    (path,) = (tmp_path / "cache" / "shardb").iterdir()
    found: dict[str, float] = json.loads(path.read_text())
    return found


def test_is_a_spoilt_cache_of_times_no_hindrance(ask: Any, store: Path, tmp_path: Path) -> None:
    ask("fsck", store)
    (path,) = (tmp_path / "cache" / "shardb").iterdir()
    path.write_text("[1, 2")
    assert ask("fsck", store).code == 0
    assert len(verified(tmp_path)) == 10


def test_does_gc_say_what_it_freed(ask: Any, store: Path) -> None:
    dry = ask("gc", store, "--dry-run", "--json").json
    assert dry["freed_bytes"] > 0
    told = ask("gc", store, "--json").json
    assert told["freed_bytes"] == dry["freed_bytes"]
    assert "freed 0 B" in ask("gc", store).out


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
