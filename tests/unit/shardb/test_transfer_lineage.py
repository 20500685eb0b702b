"""Does the walk back through the records find ancestors, and only them?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardb
from shardb import branching
from shardb.errors import ConflictError, LogDamagedError
from shardb.transfer import copy_commit
from shardb.transfer_lineage import PastStep, Walk, lineage
from tests.support.transfer_stores import commit


def record(name: str, parent: str | None, rolled_up: str = "") -> dict[str, Any]:
    """A commit record; ids are single letters, steps their places in the alphabet."""
    return {
        **entry(name, parent),
        "kind": "commit",
        "shards": {},
        "state": {},
        "statistics": {},
        "recipe": None,
        "rolled_up": [entry(letter, None) for letter in rolled_up],
    }


def entry(name: str, parent: str | None) -> dict[str, Any]:
    step = ord(name) - ord("a")
    fields = {"branch": "main", "step": step, "time": 0.0, "bytes": 1, "metrics": {}}
    return {"id": name, "parent": parent, **fields}


def walked(records: list[dict[str, Any]], start: str, ends: str) -> tuple[str, str | None, bool]:
    """Steps between as letters, the end that was reached, and whether the walk is complete."""
    walk = Walk(start, list(ends))
    for item in reversed(records):
        walk.meet(item)
    found = walk.lineage()
    return "".join(step.commit for step in found.steps), found.reached, found.complete


PLAIN = [record("a", None), record("b", "a"), record("c", "b"), record("d", "c")]
ROLLED = [record("c", None, "ab"), record("f", "c", "de"), record("g", "f")]


@pytest.mark.parametrize(
    ("records", "start", "ends", "expected"),
    [
        (PLAIN, "d", "", ("abc", None, True)),
        (PLAIN, "d", "b", ("c", "b", True)),
        (PLAIN, "d", "d", ("", "d", True)),
        (PLAIN, "d", "ab", ("c", "b", True)),
        (PLAIN, "c", "d", ("ab", None, True)),
        (PLAIN, "d", "x", ("abc", None, True)),
        (PLAIN[1:], "d", "a", ("bc", "a", True)),
        (PLAIN[2:], "d", "a", ("c", None, False)),
        (ROLLED, "g", "", ("abcdef", None, True)),
        (ROLLED, "g", "d", ("ef", "d", True)),
        (ROLLED, "g", "a", ("bcdef", "a", True)),
        (ROLLED, "e", "b", ("cd", "b", True)),
        ([*PLAIN, record("x", "b")], "x", "c", ("ab", None, True)),
        ([*PLAIN, record("x", "b")], "x", "b", ("", "b", True)),
        ([*ROLLED, record("e", "d")], "e", "", ("abcd", None, True)),
    ],
)
def test_what_does_the_walk_find(
    records: list[dict[str, Any]],
    start: str,
    ends: str,
    expected: tuple[str, str | None, bool],
) -> None:
    assert walked(records, start, ends) == expected


@pytest.mark.parametrize("damage", [{"step": "x"}, {"metrics": 3}, {"id": None, "time": None}])
def test_is_a_garbled_entry_an_error(damage: dict[str, Any]) -> None:
    with pytest.raises(LogDamagedError):
        PastStep.from_record({**entry("a", None), **damage})
    with pytest.raises(LogDamagedError):
        PastStep.from_record({})


def test_is_a_rewound_line_no_ancestor(quick_path: Path) -> None:
    with shardb.open(quick_path / "run", create=True) as store:
        first = commit(store, 0)
        left = commit(store, 1)
        branching.rewind(store, "main", first.id)
        head = commit(store, 2)
        assert lineage(store, head.id, [first.id]).reached == first.id
        assert lineage(store, head.id, [left.id]).reached is None
        with shardb.open(quick_path / "copy", create=True) as target:
            copy_commit(store, target, left.id)
            with pytest.raises(ConflictError, match="does not come"):
                copy_commit(store, target, head.id)


def test_is_the_walk_right_over_closed_segments(
    quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardb.appending.SEGMENT_LIMIT_BYTES", 3000)
    with (
        shardb.open(quick_path / "run", create=True) as store,
        shardb.open(quick_path / "copy", create=True) as target,
    ):
        for step in range(25):
            head = commit(store, step, size=100)
            if step == 3:
                copy_commit(store, target)
        assert len(store.log.sequences()) > 2
        found = lineage(store, head.id, [])
        assert [step.step for step in found.steps] == list(range(24))
        assert found.complete
        lost = sorted(Path(store.root, "wal").iterdir())[1]
        lost.unlink()
        assert not lineage(store, head.id, []).complete
        with pytest.raises(LogDamagedError, match="part of the log is lost"):
            copy_commit(store, target)
        copy_commit(store, target, branch="other")
        assert target.resolve("other").step == 24
