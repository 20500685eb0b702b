"""Is a commit that goes while somebody begins to read it never read?"""

from __future__ import annotations

from pathlib import Path

import pytest

import shardb
from shardb.errors import ConflictError
from tests.support.stores import InterposedFiles, commit_step, values_of

STEPS_TO_RETIRE = 3


def opened_lease(path: str) -> bool:
    return "/leases/" in path


def test_is_a_commit_that_goes_while_it_is_leased_not_read(root: Path) -> None:
    """Between finding the newest commit and locking its lease, the writer goes on."""
    with shardb.open(root, create=True) as writer:
        commit_step(writer, 1)
        steps = iter(range(2, 2 + STEPS_TO_RETIRE))

        def go_on(path: str, *_: object) -> None:
            if opened_lease(path):
                for step in steps:
                    commit_step(writer, step)

        with shardb.open(root, files=InterposedFiles("open", go_on)) as reader:
            with reader.at() as view:
                assert view.commit.step == 1 + STEPS_TO_RETIRE
                assert set(values_of(view).values()) == {4.0, 4.25}
            assert list((root / "leases").iterdir()) == []


def test_is_a_reader_told_that_is_never_quick_enough(root: Path) -> None:
    with shardb.open(root, create=True) as writer:
        commit_step(writer, 1)

        def go_on(path: str, *_: object) -> None:
            if opened_lease(path):
                for _ in range(STEPS_TO_RETIRE):
                    commit_step(writer, writer.resolve().step + 1)

        with shardb.open(root, files=InterposedFiles("open", go_on)) as reader:
            with pytest.raises(ConflictError, match="retired at every attempt"):
                reader.at()
            assert list((root / "leases").iterdir()) == []


def test_is_a_lease_taken_again_that_somebody_took_for_dead(root: Path) -> None:
    """Between making the file and locking it, a collection found it without an owner."""
    with shardb.open(root, create=True) as writer:
        commit_step(writer, 1)
        removed: list[int] = []

        def collect(*_: object, blocking: bool, **__: object) -> None:
            if blocking and not removed and list((root / "leases").iterdir()):
                removed.append(len(writer.leases.leased_commits()))

        with shardb.open(root, files=InterposedFiles("lock", collect)) as reader, reader.at():
            assert removed == [0]
            assert len(list((root / "leases").iterdir())) == 1
