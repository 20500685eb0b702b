"""Does a base outlive what is a difference to it? Does the log alone say what is packed?

The tables are driven by records; no file is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardb import state
from shardb.errors import LogDamagedError
from shardb.pack_choice import may_pack, may_unpack
from shardb.records import Commit, Record, ShardEntry, new_record
from shardb.references import CHAIN_MAX, Retired, chain_of, held, held_packs, pack_row, pack_rows
from shardb.state import DictTables

BYTES = 4096


def digest_of(number: int) -> str:
    return f"{number:032x}"


class Run:
    """Tables, and the records that made them."""

    def __init__(self, keep_last: int = 1) -> None:
        self.tables = DictTables()
        self.records: list[Record] = []
        self.retired: list[Retired] = []
        self.head: str | None = None
        self.step = 0
        self.do("policy", policy={"keep_last": keep_last})

    def apply(self, record: Record, leased: Sequence[str] = ()) -> None:
        self.records.append(record)
        self.retired += state.apply(self.tables, record)
        self.retired += state.sweep(self.tables, leased)

    def do(self, kind: str, **fields: Any) -> None:
        self.apply(new_record(kind, **fields))

    def commit(self, *numbers: int, snapshot: str | None = None) -> str:
        """Commit a step whose shards are the objects of these numbers."""
        record = commit_record(self.step, self.head, numbers)
        self.apply(record)
        self.step, self.head = self.step + 1, record["id"]
        if snapshot is not None:
            self.do("snapshot", name=snapshot, commit=self.head)
        return str(record["id"])

    def pack(self, number: int, base: int | None = None) -> None:
        self.apply(pack_record(number, base))

    def delete(self, snapshot: str) -> None:
        self.do("delete", what="snapshot", name=snapshot)


def commit_record(step: int, parent: str | None, numbers: Sequence[int]) -> Record:
    shards = {
        f"shard_{position}": ShardEntry(digest=digest_of(number), bytes=BYTES, step=step)
        for position, number in enumerate(numbers)
    }
    commit = Commit(
        id=f"{step:032x}", branch="main", step=step, parent=parent, shards=shards, time=float(step)
    )
    return commit.to_record()


def pack_record(number: int, base: int | None, size: int = BYTES) -> Record:
    return new_record(
        "pack",
        digest=bytes.fromhex(digest_of(number)),
        base=None if base is None else bytes.fromhex(digest_of(base)),
        bytes=size,
        packed_bytes=100,
        file_digest=bytes(16),
    )


def snapshots_of(*numbers: int) -> Run:
    """A snapshot for each object, named by its number, and a head that needs none of them."""
    run = Run()
    for number in numbers:
        run.commit(number, snapshot=f"s{number}")
    run.commit(99)
    return run


def test_does_a_base_outlive_its_snapshot_while_a_delta_needs_it() -> None:
    run = snapshots_of(1, 2)
    run.pack(1)
    run.pack(2, base=1)
    run.delete("s1")
    assert run.retired == []
    assert held(run.tables, {digest_of(1)}) == {digest_of(1)}
    run.delete("s2")
    assert [(item.digest, item.packed) for item in run.retired] == [
        (digest_of(2), True),
        (digest_of(1), True),
    ]
    assert pack_rows(run.tables) == {}


def test_is_a_base_retired_without_that_reference() -> None:
    """The control arm: an object that nothing is a difference to goes with its snapshot."""
    run = snapshots_of(1, 2)
    run.pack(1)
    run.pack(2)
    run.delete("s1")
    assert [item.digest for item in run.retired] == [digest_of(1)]


def test_does_unpacking_let_the_base_go() -> None:
    run = snapshots_of(1, 2)
    run.pack(2, base=1)
    run.delete("s1")
    run.do("unpack", digest=bytes.fromhex(digest_of(2)))
    assert run.retired == [Retired(digest=digest_of(1), bytes=BYTES)]


def test_is_a_chain_of_four_taken_and_one_of_five_refused() -> None:
    run = snapshots_of(*range(6))
    run.pack(0)
    for number in range(1, CHAIN_MAX):
        run.pack(number, base=number - 1)
    assert len(chain_of(run.tables, digest_of(CHAIN_MAX - 1))) == CHAIN_MAX
    with pytest.raises(LogDamagedError, match="cannot be the base"):
        run.pack(CHAIN_MAX, base=CHAIN_MAX - 1)
    run.pack(CHAIN_MAX)  # by itself it may be


@pytest.mark.parametrize(
    ("number", "base", "size"),
    [
        pytest.param(7, None, BYTES, id="an unknown object"),
        pytest.param(1, None, BYTES + 1, id="another size"),
        pytest.param(1, 7, BYTES, id="an unknown base"),
        pytest.param(1, 1, BYTES, id="its own base"),
        pytest.param(2, None, BYTES, id="packed already"),
        pytest.param(1, 3, BYTES, id="a circle"),
    ],
)
def test_is_a_record_refused_that_cannot_be(number: int, base: int | None, size: int) -> None:
    run = snapshots_of(1, 2, 3)
    run.pack(2, base=1)
    run.pack(3, base=2)
    before = DictTables.copy_of(run.tables).tables
    with pytest.raises(LogDamagedError):
        state.apply(run.tables, pack_record(number, base, size))
    assert run.tables.tables == before


@pytest.mark.parametrize("field", ["digest", "base", "bytes", "packed_bytes", "file_digest"])
@pytest.mark.parametrize("value", [7.5, "text", b"short", -1])
def test_is_a_garbled_record_refused(field: str, value: Any) -> None:
    run = snapshots_of(1, 2)
    with pytest.raises(LogDamagedError):
        state.apply(run.tables, {**pack_record(2, 1), field: value})


def test_does_a_checkpoint_keep_what_is_packed() -> None:
    run = snapshots_of(1, 2)
    run.pack(1)
    run.pack(2, base=1)
    run.delete("s1")
    again = DictTables()
    state.apply(again, new_record("checkpoint", state=state.full_state(run.tables)))
    assert again.tables["packs"] == run.tables.tables["packs"]
    assert again.tables["objects"] == run.tables.tables["objects"]
    state.apply(run.tables, new_record("checkpoint", state=state.full_state(run.tables)))
    assert again.tables["objects"] == run.tables.tables["objects"]


def test_does_a_checkpoint_keep_what_a_reader_still_needs() -> None:
    run = snapshots_of(1, 2)
    run.pack(1)
    run.pack(2, base=1)
    run.delete("s1")
    leased = run.tables.get("snapshots", "s2")["commit"]
    run.apply(new_record("delete", what="snapshot", name="s2"), leased=[leased])
    rows = dict(run.tables.tables["packs"])
    assert set(rows) == {digest_of(1), digest_of(2)}
    run.apply(new_record("checkpoint", state=state.full_state(run.tables)), leased=[leased])
    assert run.tables.tables["packs"] == rows
    run.retired += state.sweep(run.tables, ())
    assert {item.digest for item in run.retired} == {digest_of(1), digest_of(2)}
    assert run.tables.tables["packs"] == {}


def test_does_a_store_that_never_packed_say_nothing_of_it() -> None:
    assert "packs" not in state.full_state(snapshots_of(1, 2).tables)


@pytest.mark.parametrize("has_reader", [True, False])
def test_is_an_object_whole_when_a_commit_brings_it_back(has_reader: bool) -> None:
    run = snapshots_of(1, 2)
    run.pack(1)
    run.pack(2, base=1)
    readers = [run.tables.get("snapshots", name)["commit"] for name in ("s1", "s2")]
    for name in ("s1", "s2"):
        record = new_record("delete", what="snapshot", name=name)
        run.apply(record, leased=readers if has_reader else ())
    run.apply(commit_record(run.step, run.head, [2]), leased=readers if has_reader else ())
    assert pack_row(run.tables, digest_of(2)) is None
    assert held(run.tables, {digest_of(1), digest_of(2)}) == {digest_of(2)}


OBJECTS = 3
Choice = tuple[str, int, int]
CHOICES = st.lists(
    st.tuples(
        st.sampled_from([*["commit", "snapshot", "delete", "pack"] * 3, "unpack", "checkpoint"]),
        st.integers(0, OBJECTS - 1),
        st.integers(0, OBJECTS),
    ),
    min_size=20,
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(choices=CHOICES, leases=st.lists(st.integers(0, 7), min_size=40, max_size=40))
def test_is_what_is_packed_the_same_whoever_read_meanwhile(
    choices: list[Choice], leases: list[int]
) -> None:
    """One store whose readers hold commits for long, one without readers, one made anew."""
    eager, lazy, rebuilt = DictTables(), DictTables(), DictTables()
    head, step = None, 0
    for number, (what, first, second) in enumerate(choices):
        record = record_of(eager, what, first, second, head, step)
        if record is None:
            continue
        if what == "commit":
            head, step = record["id"], step + 1
        for tables in (eager, lazy, rebuilt):
            state.apply(tables, record)
        state.sweep(eager, ())
        commits = [commit for commit, _ in lazy.items("commits")]
        state.sweep(lazy, [c for c in commits if int(c, 16) % 8 >= leases[number % 40]])
        assert held_packs(lazy) == held_packs(eager) == held_packs(rebuilt)
        every = {digest_of(n) for n in range(OBJECTS)}
        assert held(lazy, every) == held(eager, every) == held(rebuilt, every)
    for tables in (lazy, rebuilt):
        state.sweep(tables, ())
        assert tables.tables["packs"] == eager.tables["packs"]
        assert tables.tables["objects"] == eager.tables["objects"]


def record_of(
    tables: DictTables, what: str, first: int, second: int, head: str | None, step: int
) -> Record | None:
    """The record that a choice makes, as the store would check it; None where it would refuse."""
    object_digest, base = digest_of(first), None if second == OBJECTS else second
    if what == "commit":
        return commit_record(step, head, [first, second % OBJECTS])
    if what == "snapshot" and head is not None and tables.get("snapshots", f"s{first}") is None:
        return new_record("snapshot", name=f"s{first}", commit=head)
    if what == "delete" and tables.get("snapshots", f"s{first}") is not None:
        return new_record("delete", what="snapshot", name=f"s{first}")
    if what == "checkpoint":
        return new_record("checkpoint", state=state.full_state(tables))
    if what == "unpack" and may_unpack(tables, object_digest):
        return new_record("unpack", digest=bytes.fromhex(object_digest))
    if what == "pack" and may_pack(
        tables, object_digest, None if base is None else digest_of(base)
    ):
        record = pack_record(first, base)
        try:
            state.apply(DictTables.copy_of(tables), record)
        except LogDamagedError:
            return None
        return record
    return None
