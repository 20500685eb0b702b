"""Do the verbs that look at and look after a store keep their contracts?"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

import shardb
from shardb.branching import rewind
from tests.support.commands import Ask, check_refused
from tests.support.small_stores import (
    SHARDS,
    copy_store,
    fill_store,
    flip_bit,
    object_of,
    tree,
)

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> Path:
    """A copy of the store."""
    return copy_store(whole, tmp_path / "run")


# show


def test_does_show_have_the_promised_keys(ask: Ask, store: Path) -> None:
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


def test_does_a_store_without_commits_show_nothing(ask: Ask, tmp_path: Path) -> None:
    ask("init", tmp_path / "new")
    check_refused(ask("show", tmp_path / "new"), 4, "no commit yet")
    assert ask("log", tmp_path / "new", "--json").json == []
    assert ask("fsck", tmp_path / "new").code == 0


def test_is_what_json_cannot_hold_null(ask: Ask, tmp_path: Path) -> None:
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


def test_is_a_near_name_proposed(ask: Ask, store: Path) -> None:
    check_refused(ask("show", store, "step2"), 4, "step-2")
    check_refused(ask("show", store, "step-3"), 4, "2, 5, 6")


# log


def test_does_the_log_tell_every_step(ask: Ask, store: Path) -> None:
    rows = ask("log", store, "--json").json
    assert [row["step"] for row in rows] == list(range(7))
    assert {"commit", "step", "time", "metrics", "branch"} <= set(rows[0])
    assert [row["metrics"]["loss"] for row in rows] == [1 / (step + 1) for step in range(7)]
    assert rows[2]["notes"] == ["snapshot step-2"]
    assert [row["step"] for row in ask("log", store, "--limit", 2, "--json").json] == [5, 6]
    text = ask("log", store).out.splitlines()
    assert len(text) == 8
    assert "0.5000" in text[2]


def test_does_the_log_read_closed_segments_and_name_damage(ask: Ask, tmp_path: Path) -> None:
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


def test_does_the_log_open_and_change_nothing(ask: Ask, store: Path) -> None:
    before = tree(store)
    ask("log", store)
    assert tree(store) == before
    (store / "wal/0000000001.wal").write_bytes((store / "wal/0000000001.wal").read_bytes()[:-9])
    assert len(ask("log", store, "--json").json) == 6


def test_does_the_log_tell_rewinds_and_changes(ask: Ask, store: Path) -> None:
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


def test_does_a_snapshot_pin_the_step_of_its_name(ask: Ask, store: Path) -> None:
    told = ask("snapshot", store, "step-5", "--json").json
    assert (told["step"], told["created"]) == (5, True)
    again = ask("snapshot", store, "step-5")
    assert (again.code, "was there already" in again.out) == (0, True)
    check_refused(ask("snapshot", store, "step-3"), 4, "2, 5, 6")
    check_refused(ask("snapshot", store, "step-6", "--step", 5), 2)


def test_does_a_free_name_pin_the_newest_or_what_is_said(ask: Ask, store: Path) -> None:
    assert "step 6" in ask("snapshot", store, "now").out
    assert ask("snapshot", store, "best", "--step", 5, "--json").json["step"] == 5
    assert ask("snapshot", store, "old", "--ref", "step-2", "--json").json["step"] == 2
    check_refused(ask("snapshot", store, "x", "--step", 5, "--ref", "main"), 2)
    check_refused(ask("snapshot", store, "bad name"), 2)
    check_refused(ask("snapshot", store), 2, "NAME")
    names = [row["snapshot"] for row in ask("snapshots", store, "--json").json]
    assert names == ["old", "step-2", "best", "now"]


def test_is_a_taken_name_a_conflict_only_for_another_commit(ask: Ask, store: Path) -> None:
    ask("snapshot", store, "best", "--step", 5)
    assert ask("snapshot", store, "best", "--step", 5).code == 0
    check_refused(ask("snapshot", store, "best", "--step", 6), 5, "step 5")
    check_refused(ask("snapshot", store, "best"), 5)


def test_does_only_verify_read_the_objects(ask: Ask, store: Path) -> None:
    flip_bit(object_of(store, 5, "params/a"), 5000)
    check_refused(ask("snapshot", store, "a", "--step", 5, "--verify"), 3, "params/a")
    assert len(ask("snapshots", store, "--json").json) == 1
    assert ask("snapshot", store, "a", "--step", 5).code == 0
    assert ask("snapshot", store, "b", "--step", 6, "--verify").code == 0


# recover


def test_does_recover_name_what_it_cut(ask: Ask, store: Path) -> None:
    with (store / "wal/0000000001.wal").open("ab") as file:
        file.write(b"SDBW half a record")
    told = ask("recover", store, "--json").json
    assert set(told) == {"opened", "dropped", "rebuilt", "needs", "warnings"}
    assert told["opened"]["main"]["step"] == 6
    assert set(told["dropped"][0]) == {"what", "path", "why"}
    assert ask("recover", store, "--json").json["dropped"] == []


def test_does_recover_say_what_a_refused_store_needs(ask: Ask, store: Path) -> None:
    path = store / "wal/0000000001.wal"
    path.write_bytes(path.read_bytes()[:-9])
    before = tree(store / "wal")
    answer = ask("recover", store, "--json")
    check_refused(answer, 3, str(path))
    assert answer.json["needs"] == f"shardb fsck {store}"
    assert answer.json["error"]["kind"] == "log_truncated"
    assert tree(store / "wal") == before


def test_does_recover_send_damaged_history_to_fsck(ask: Ask, tmp_path: Path) -> None:
    root = tmp_path / "long"
    fill_store(root, range(12), segment_bytes=3000)
    assert ask("recover", root, "--json").json["needs"] is None
    closed = min((root / "wal").iterdir())
    flip_bit(closed, closed.stat().st_size // 2)
    answer = ask("recover", root, "--json")
    assert (answer.code, answer.json["needs"]) == (0, f"shardb fsck {root}")
    assert answer.json["opened"]["main"]["step"] == 11


def test_does_recover_rebuild_the_index(ask: Ask, store: Path) -> None:
    (store / "index/data.mdb").unlink()
    told = ask("recover", store, "--json").json
    assert told["rebuilt"][0]["what"] == "index"


# fsck, gc


def test_do_only_errors_make_fsck_exit_1(ask: Ask, store: Path) -> None:
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


def test_does_fsck_print_its_document_whatever_the_exit_code(ask: Ask, store: Path) -> None:
    answer = ask("fsck", store / "nowhere", "--json")
    check_refused(answer, 4)
    assert (answer.json["findings"], answer.json["complete"]) == ([], False)
    assert answer.json["error"]["kind"] == "not_found"
    shutil.rmtree(store / "objects")
    (store / "objects").write_bytes(b"a file")
    answer = ask("fsck", store, "--json")
    assert (answer.code, answer.err) == (1, "")
    [taken] = [found for found in answer.json["findings"] if found["kind"] == "place_taken"]
    assert (taken["path"], answer.json["complete"]) == (str(store / "objects"), False)


def test_does_a_budget_go_on_where_the_last_one_ended(
    ask: Ask, store: Path, tmp_path: Path
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


def test_is_a_spoilt_cache_of_times_no_hindrance(ask: Ask, store: Path, tmp_path: Path) -> None:
    ask("fsck", store)
    (path,) = (tmp_path / "cache" / "shardb").iterdir()
    path.write_text("[1, 2")
    assert ask("fsck", store).code == 0
    assert len(verified(tmp_path)) == 10


def test_does_gc_say_what_it_freed(ask: Ask, store: Path) -> None:
    dry = ask("gc", store, "--dry-run", "--json").json
    assert dry["freed_bytes"] > 0
    told = ask("gc", store, "--json").json
    assert told["freed_bytes"] == dry["freed_bytes"]
    assert "freed 0 B" in ask("gc", store).out
