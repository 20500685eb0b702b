"""Do copies between two stores, in any order with everything else, keep both of them right?

After each action the log of each store, replayed from nothing, gives the tables of its index; every
reference has its object with the right bytes; and a copy that was refused changed nothing.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import shardb
from shardb import branching, state
from shardb.errors import ConflictError, NotFoundError, UsageError
from shardb.state import TABLES, DictTables
from shardb.testing.oracle import QuickFileSystem
from shardb.transfer import clone, copy_commit, copy_snapshot
from tests.support.transfer_stores import commit

MEMORY = Path("/dev/shm")
NAMES = ("main", "other")
SNAPSHOTS = ("first", "second")
REFUSALS = (ConflictError, NotFoundError, UsageError)
ACTIONS = (
    *["commit"] * 3,
    *["copy"] * 4,
    *("snapshot", "copy snapshot", "clone", "rewind"),
    *("branch", "delete branch", "delete snapshot"),
)
# What is done, to which store, and with which two names. Mostly to one of them, else every copy
# meets a line of the other's own and is refused.
actions = st.tuples(
    st.sampled_from(ACTIONS),
    st.sampled_from([True] * 5 + [False]),
    st.sampled_from([0, 0, 1]),
    st.integers(0, 1),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(actions, min_size=16, max_size=24))
def test_do_any_actions_keep_both_stores_right(taken: list[tuple[str, bool, int, int]]) -> None:
    place = MEMORY if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        files = QuickFileSystem()
        with (
            shardb.open(f"{folder}/a", create=True, files=files, writer_threads=1) as a,
            shardb.open(f"{folder}/b", create=True, files=files, writer_threads=1) as b,
        ):
            for number, action in enumerate(taken):
                take(action, *((a, b) if action[1] else (b, a)), number=number)
                for store in (a, b):
                    check(store)


def take(
    action: tuple[str, bool, int, int], ours: shardb.Store, theirs: shardb.Store, *, number: int
) -> None:
    """Do one action; a refusal is an answer, and changes nothing."""
    what, _, first, second = action
    name, other, snapshot = NAMES[first], NAMES[second], SNAPSHOTS[second]
    before = tables_of(theirs)
    doing: dict[str, Callable[[], object]] = {
        "commit": lambda: commit_next(ours, name, number),
        "copy": lambda: copy_commit(ours, theirs, name, other),
        "snapshot": lambda: ours.create_snapshot(snapshot, name),
        "copy snapshot": lambda: copy_snapshot(ours, theirs, snapshot),
        "clone": lambda: clone(ours, theirs),
        "rewind": lambda: branching.rewind(ours, name, oldest(ours)),
        "delete branch": lambda: branching.delete_branch(ours, name),
        "delete snapshot": lambda: branching.delete_snapshot(ours, snapshot),
        "branch": lambda: branching.create_branch(ours, name, other),
    }
    try:
        doing[what]()
    except REFUSALS:
        if what in ("copy", "copy snapshot"):
            assert tables_of(theirs) == before


def commit_next(store: shardb.Store, branch: str, number: int) -> None:
    head = store.branches().get(branch)
    step = head.step + 1 if head else number
    seed = number % 3  # equal steps of two lines are sometimes equal bytes
    commit(store, step, branch=branch, seed=seed, size=100, shards=("params/block_000",))


def oldest(store: shardb.Store) -> str:
    commits = store.commits()
    if not commits:
        raise NotFoundError("nothing to go back to")
    return commits[0].id


def tables_of(store: shardb.Store) -> dict[str, dict[str, Any]]:
    return store.index.read(lambda tables: {name: dict(tables.items(name)) for name in TABLES})


def check(store: shardb.Store) -> None:
    replayed = DictTables()
    for record in store.history():
        state.apply(replayed, record)
    state.sweep(replayed, ())
    indexed = tables_of(store)
    for name in ("branches", "snapshots", "commits", "pins", "abandoned", "objects"):
        assert replayed.tables[name] == indexed[name], name
    counted = Counter(
        bytes(digest).hex()
        for record in indexed["commits"].values()
        for digest, *_ in record["shards"].values()
    )
    assert {digest: row[1] for digest, row in indexed["objects"].items()} == counted
    files = {path.stem: path for path in Path(store.root, "objects").iterdir()}
    for digest in indexed["objects"]:
        assert xxhash.xxh3_128_hexdigest(files[digest].read_bytes()) == digest
