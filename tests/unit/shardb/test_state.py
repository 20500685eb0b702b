"""Do the same records give the same tables, in memory and in the index, and keep what is pinned?"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardb import records, references, state
from shardb.errors import LogDamagedError
from shardb.filesystem import RealFileSystem
from shardb.index import Index
from shardb.retention import Policy
from shardb.state import TABLES, DictTables
from tests.support.log_records import Log, applied, commit, digest, live, record


def swept(tables: DictTables, *leased: str) -> set[str]:
    """Sweep; the shards whose objects are retired."""
    return {f"s{int(r.digest[:2], 16)}" for r in state.sweep(tables, leased)}


LINE: Log = [
    record("init", store_id="ab"),
    commit("c1", 1, None, 1, 9),
    commit("c2", 2, "c1", 2, 9),
    commit("c3", 3, "c2", 3, 9),
]


def test_are_the_two_newest_commits_of_a_branch_kept() -> None:
    tables = applied(LINE)
    assert live(tables) == {"c2", "c3"}
    assert tables.get("branches", "main") == {"head": "c3", "retained": ["c2", "c3"]}
    assert set(tables.tables["condemned"]) == {"c1"}


def test_are_objects_retired_only_with_their_last_reference() -> None:
    tables = applied(LINE)
    assert swept(tables) == {"s1"}
    assert set(tables.tables["objects"]) == {digest(s).hex() for s in (2, 3, 9)}
    assert tables.get("objects", digest(9).hex()) == [4096, 2]
    assert set(tables.tables["commits"]) == {"c2", "c3"}
    assert swept(tables) == set()


def test_does_a_lease_keep_a_condemned_commit_for_the_next_sweep() -> None:
    tables = applied(LINE)
    assert swept(tables, "c1") == set()
    assert tables.get("commits", "c1") is not None
    assert swept(tables) == {"s1"}


def test_is_an_object_counted_as_often_as_a_commit_names_it() -> None:
    tables = applied(
        [commit("c1", 1, None, 5, 5, 5), commit("c2", 2, "c1", 6), commit("c3", 3, "c2", 7)]
    )
    assert tables.get("objects", digest(5).hex()) == [4096, 3]
    assert swept(tables) == {"s5"}


def test_does_a_snapshot_keep_a_commit_until_it_is_deleted() -> None:
    tables = applied([*LINE[:2], record("snapshot", name="first", commit="c1"), *LINE[2:]])
    assert live(tables) == {"c1", "c2", "c3"}
    assert swept(tables) == set()
    applied([record("delete", what="snapshot", name="first")], tables)
    assert live(tables) == {"c2", "c3"}
    assert swept(tables) == {"s1"}


def test_is_a_commit_with_two_names_kept_by_either() -> None:
    names = [record("snapshot", name=name, commit="c1") for name in ("a", "b")]
    tables = applied([*LINE[:2], *names, *LINE[2:]])
    applied([record("delete", what="snapshot", name="a")], tables)
    assert "c1" in live(tables)
    applied([record("delete", what="snapshot", name="b")], tables)
    assert "c1" not in live(tables)


def test_does_a_branch_keep_its_own_commits() -> None:
    tables = applied([*LINE, record("branch", name="side", commit="c2")])
    applied([commit(f"c{step}", step, f"c{step - 1}", step) for step in (4, 5, 6)], tables)
    assert live(tables) == {"c2", "c5", "c6"}
    applied([commit("d7", 7, "c2", 7, branch="side")], tables)
    applied([commit("d8", 8, "d7", 8, branch="side")], tables)
    assert live(tables) == {"c5", "c6", "d7", "d8"}
    applied([record("delete", what="branch", name="side")], tables)
    assert live(tables) == {"c5", "c6"}
    assert tables.get("branches", "side") is None


def test_can_a_rewind_be_undone_until_gc() -> None:
    tables = applied([*LINE, record("rewind", branch="main", to="c2", origin="c3")])
    assert tables.get("branches", "main")["head"] == "c2"
    assert live(tables) == {"c2", "c3"}
    applied([record("rewind", branch="main", to="c3", origin="c2")], tables)
    assert tables.get("branches", "main")["head"] == "c3"
    applied([record("rewind", branch="main", to="c2", origin="c3")], tables)
    applied([commit("x3", 3, "c2", 33)], tables)
    assert live(tables) == {"c2", "c3", "x3"}
    applied([record("gc", abandoned=["c2", "c3"])], tables)
    assert live(tables) == {"c2", "x3"}
    assert tables.tables["abandoned"] == {}


def test_is_gc_of_what_is_not_abandoned_nothing() -> None:
    tables = applied([*LINE, record("gc", abandoned=["c2", "c3", "nowhere"])])
    assert live(tables) == {"c2", "c3"}


def test_does_a_policy_act_at_once_on_every_branch() -> None:
    keep = {"keep_every": 0, "keep_best": 0, "best_metric": "loss", "best_mode": "min"}
    tables = applied([LINE[0], record("policy", policy={"keep_last": 5, **keep}), *LINE[1:]])
    assert live(tables) == {"c1", "c2", "c3"}
    applied([record("policy", policy={"keep_last": 1, **keep})], tables)
    assert live(tables) == {"c3"}
    assert tables.get("branches", "main")["head"] == "c3"


@pytest.mark.parametrize("kind", sorted(state.WITHOUT_EFFECT))
def test_do_records_without_effect_change_nothing(kind: str) -> None:
    tables = applied(LINE)
    before = copy.deepcopy(tables.tables)
    applied([record(kind, branch="main", text="x")], tables)
    assert tables.tables == before


def test_has_every_kind_of_record_a_meaning() -> None:
    assert set(state._APPLY) == set(records.RECORD_KINDS)


@pytest.mark.parametrize(
    "bad",
    [
        commit("c4", 4, "c2", 4),
        commit("c4", 4, None, 4),
        commit("c4", 4, "c3", 4, branch="new"),
        record("snapshot", name="x", commit="nowhere"),
        record("branch", name="x", commit="nowhere"),
        record("delete", what="snapshot", name="nothing"),
        record("delete", what="branch", name="nothing"),
        record("rewind", branch="nothing", to="c3"),
        record("rewind", branch="main", to="nowhere"),
        record("policy", policy={"keep_last": 0}),
        record("policy", policy={"keep_lots": 3}),
        record("policy", policy=5),
        record("checkpoint", state={}),
        record("checkpoint", state=None),
        record("gc", abandoned=None),
        record("init"),
        record("snapshot", name="x"),
        {**commit("c4", 4, "c3", 4), "shards": {"a": 5}},
        {**commit("c4", 4, "c3", 4), "branch": 5},
    ],
    ids=lambda bad: f"{bad['kind']}",
)
def test_is_a_record_refused_that_contradicts_the_tables(bad: Any) -> None:
    tables = applied(LINE)
    with pytest.raises(LogDamagedError):
        state.apply(tables, bad)


def test_are_pins_refused_that_were_never_given() -> None:
    """A foreign checkpoint may say anything; our own records cannot."""
    full = state.full_state(applied(LINE))
    full["pins"] = {}
    tables = applied([record("checkpoint", state=full)])
    with pytest.raises(LogDamagedError, match="takes a pin"):
        state.apply(tables, record("delete", what="branch", name="main"))


def test_is_a_head_refused_that_the_branch_does_not_retain() -> None:
    tables = applied(LINE)
    tables.put("branches", "main", {"head": "c3", "retained": ["c2"]})
    with pytest.raises(LogDamagedError, match="not among what it retains"):
        state.apply(tables, record("policy", policy=Policy().to_record()))


@pytest.mark.parametrize(
    ("table", "key", "row"),
    [
        ("branches", "main", 5),
        ("branches", "main", {}),
        ("branches", "main", {"head": "c3", "retained": []}),
        ("branches", "main", {"head": "c3", "retained": ["c3", "nowhere"]}),
        ("branches", "new", {"head": "nowhere", "retained": ["nowhere"]}),
        ("snapshots", "x", {"commit": "nowhere", "time": 0.0}),
        ("snapshots", "x", {}),
        ("pins", "c3", 0),
        ("pins", "c3", "1"),
        ("pins", "nowhere", 1),
        ("abandoned", "nowhere", {}),
        ("commits", "c3", {}),
        ("commits", "other", commit("c3", 3, "c2", 3, 9)),
        ("meta", "policy", {"keep_last": 0}),
        ("meta", "closed", 5),
        ("meta", "closed", [[1, 2]]),
        ("meta", "closed", [["1", 2, b""]]),
    ],
)
def test_is_a_full_state_refused_with_a_garbled_row(table: str, key: str, row: Any) -> None:
    full = state.full_state(applied(LINE))
    assert applied([record("checkpoint", state=copy.deepcopy(full))])
    full[table][key] = row
    with pytest.raises(LogDamagedError):
        applied([record("checkpoint", state=full)])


# The same meaning everywhere


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    (tmp_path / "index").mkdir()
    opened = Index(RealFileSystem(), str(tmp_path / "index"))
    yield opened
    opened.close()


def random_log(seed: int, length: int = 60) -> Log:
    """A history that a store could have made: commits, names, rewinds, policies."""
    source = random.Random(seed)
    log: Log = [record("init", store_id="ab")]
    tables = applied(log)
    for number in range(length):
        heads = {name: row["head"] for name, row in tables.items("branches")}
        branch = source.choice([*heads, "main", f"b{number}"])
        name = f"c{number}"
        choice = source.random()
        shards = [source.randrange(12) for _ in range(source.randint(1, 4))]
        one = commit(name, number + 1, heads.get(branch), *shards, branch=branch)
        pinned = sorted(live(tables))
        if pinned and choice < 0.15:
            one = record("snapshot", name=f"s{number}", commit=source.choice(pinned))
        elif tables.tables["snapshots"] and choice < 0.25:
            one = record("delete", what="snapshot", name=min(tables.tables["snapshots"]))
        elif len(heads) > 1 and choice < 0.3:
            one = record("delete", what="branch", name=max(heads))
        elif heads and choice < 0.45:
            target = source.choice(pinned)
            one = record("rewind", branch=min(heads), to=target)
        elif choice < 0.5:
            one = record("gc", abandoned=sorted(tables.tables["abandoned"]))
        elif pinned and choice < 0.55:
            one = record("branch", name=f"b{number}", commit=source.choice(pinned))
        log.append(one)
        state.apply(tables, one)
    return log


@pytest.mark.parametrize("seed", range(6))
def test_are_the_tables_of_the_index_those_of_a_dictionary(index: Index, seed: int) -> None:
    log = random_log(seed)
    expected = applied(log)
    index.write(lambda tables: [state.apply(tables, one) for one in log])
    for table in TABLES:
        rows = index.read(lambda tables, name=table: dict(tables.items(name)))
        assert rows == expected.tables[table]


@pytest.mark.parametrize("seed", range(20))
def test_does_a_checkpoint_say_all_that_matters(seed: int) -> None:
    """From any point on, starting at a checkpoint is as good as starting at the beginning."""
    log = random_log(seed)
    for cut in range(10, len(log), 10):
        before = applied(log[:cut])
        mark = record("checkpoint", state=copy.deepcopy(state.full_state(before)))
        fresh, going_on = applied([mark, *log[cut:]]), applied([mark, *log[cut:]], before)
        straight = applied(log)
        for tables in (fresh, going_on, straight):
            state.sweep(tables, ())
        assert fresh.tables == straight.tables
        assert going_on.tables == straight.tables


@pytest.mark.parametrize("seed", range(20))
def test_do_references_and_pins_stay_what_they_count(seed: int) -> None:
    source = random.Random(seed)
    tables = DictTables()
    for one in random_log(seed):
        state.apply(tables, one)
        leased = {c for c in tables.tables["commits"] if source.random() < 0.3}
        state.sweep(tables, leased if source.random() < 0.5 else ())
        counted: dict[str, int] = {}
        for row in tables.tables["commits"].values():
            for value, *_ in row["shards"].values():
                counted[value.hex()] = counted.get(value.hex(), 0) + 1
        assert {key: row[1] for key, row in tables.items("objects")} == counted
        pins: dict[str, int] = {}
        for row in tables.tables["branches"].values():
            assert row["head"] == row["retained"][-1]
            for name in row["retained"]:
                pins[name] = pins.get(name, 0) + 1
        for row in tables.tables["snapshots"].values():
            pins[row["commit"]] = pins.get(row["commit"], 0) + 1
        for name in tables.tables["abandoned"]:
            pins[name] = pins.get(name, 0) + 1
        assert tables.tables["pins"] == pins
        assert set(pins) == live(tables)


@pytest.mark.parametrize("seed", range(10))
def test_is_what_a_pinned_commit_needs_held_and_nothing_else(seed: int) -> None:
    tables = applied(random_log(seed))
    needed = {
        value.hex()
        for name in live(tables)
        for value, *_ in tables.get("commits", name)["shards"].values()
    }
    everything = {digest(shard).hex() for shard in range(14)}
    assert references.held(tables, everything) == needed
