"""Does a clone say what went while it was made, and what it has where an index is full?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import pytest

import shardb
from shardb import branching
from shardb.errors import ConflictError, StorageFullError
from shardb.log import Position
from shardb.records import Record
from shardb.transfer import clone
from shardb.transfer_tally import Counts, Tally
from tests.support.transfer_stores import commit, contents


def meanwhile(act: Callable[[], object]) -> Tally:
    """A tally that does something once, as soon as the first object has arrived."""
    waiting = [act]

    def observe(counts: Counts) -> None:
        if counts.objects_done and waiting:
            waiting.pop()()

    return Tally(observe)


def test_does_a_clone_say_that_a_snapshot_was_removed_meanwhile(
    source: shardb.Store, target: shardb.Store
) -> None:
    source.create_snapshot("two", "step-2")
    source.create_snapshot("three", "step-3")
    removing = meanwhile(lambda: branching.delete_snapshot(source, "two"))
    with pytest.raises(ConflictError, match="'two', or a commit of it, went while"):
        clone(source, target, tally=removing)
    assert set(clone(source, target).snapshots) == {"three"}


@pytest.mark.parametrize("retained", [False, True])
def test_does_a_clone_beside_a_trainer_have_a_newer_head(
    source: shardb.Store, target: shardb.Store, retained: bool
) -> None:
    """The head that was there when it began may be retired when its turn comes."""
    branching.create_branch(source, "experiment", "step-2")

    def go_on() -> None:
        for step in range(3, 9):
            commit(source, step, branch="main" if step > 3 else "experiment")

    cloned = clone(source, target, tally=meanwhile(go_on), retained=retained)
    assert cloned.branches["main"].step == 8 or cloned.branches["experiment"].step == 3
    assert contents(target, "main")


def test_does_a_clone_say_that_a_branch_was_removed_meanwhile(
    source: shardb.Store, target: shardb.Store
) -> None:
    branching.create_branch(source, "other", "step-2")
    branching.create_branch(source, "zoo", "step-2")
    removing = meanwhile(lambda: branching.delete_branch(source, "zoo"))
    with pytest.raises(ConflictError, match="branch 'zoo', or a commit of it, went"):
        clone(source, target, tally=removing, retained=True)


def test_is_it_known_what_was_cloned_where_the_index_cannot_be_written(
    source: shardb.Store, target: shardb.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records are in the log; the index is caught up from it later."""
    source.create_snapshot("two", "step-2")
    append = target.appender.append_durably

    def fill_the_disk(end: Position, record: Record, **more: Any) -> Position:
        if record["kind"] == "snapshot":
            monkeypatch.setattr(target.index, "write", refuse)
        return append(end, record, **more)

    def refuse(_: object) -> NoReturn:
        raise StorageFullError("no space for the index")

    monkeypatch.setattr(target.appender, "append_durably", fill_the_disk)
    cloned = clone(source, target)
    assert cloned.snapshots["two"].step == 2
    assert target.snapshots() == {}, "the index is behind"
