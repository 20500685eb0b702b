"""Any call may fail while a step is made, in an active store too: is the run resumed?

A drawn slice of `make faults`, with every error; and what it found, each as a whole kind.
"""

from __future__ import annotations

import errno
import itertools
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

import shardb
from shardb.errors import ShardbError, StorageFailedError, StorageFullError
from shardb.testing.bases import Base
from shardb.testing.faulting import run_faulted, wrong_after
from shardb.testing.operations import Fault
from shardb.testing.recording import RecordingFileSystem
from shardb.transfer_publisher import Publisher
from tests.support.ram_disk import scratch_directory
from tests.support.small_stores import commit_step
from tools.crash_faults import ERRORS, FAULTED
from tools.crash_training import TRAIN, TRAIN_ACTIVE, goes_on, training_base

FULL = (errno.ENOSPC, errno.EDQUOT)
NEVER = Fault(operation="open", nth=1 << 30, error=errno.EIO)
OPERATIONS = "open status exists list lock rename map pwrite fdatasync database_committed".split()


@pytest.fixture(scope="module")
def base() -> Iterator[Base]:
    """Give the store of a tiny run."""
    with scratch_directory() as path:
        yield training_base(path)


def failing(
    base: Base, scratch: str, fault: Fault, verb: str = TRAIN_ACTIVE
) -> tuple[ShardbError | None, dict[str, int]]:
    """Run the step with a fault; its error, once the stores were found right and went on."""
    outcome = run_faulted(base, scratch, fault, FAULTED[verb])
    wrong = wrong_after(outcome, goes_on=goes_on if verb == TRAIN_ACTIVE else None)
    shutil.rmtree(outcome.files.root)
    assert not wrong, f"{fault}, then {outcome.error}: {wrong}"
    return outcome.error, outcome.files.calls


@pytest.mark.parametrize(("verb", "drawn"), [(TRAIN, 0), (TRAIN_ACTIVE, 2)])
def test_is_a_run_resumed_after_a_call_that_fails(
    base: Base, scratch: str, verb: str, drawn: int
) -> None:
    error, calls = failing(base, scratch, NEVER, verb)
    assert error is None
    draw = random.Random(5)
    turns = itertools.cycle(ERRORS)
    errors = 0
    for operation in OPERATIONS:
        count = calls[operation]
        for nth in sorted({1, count, *(draw.randint(1, count) for _ in range(drawn))}):
            persistent = draw.random() < 0.3
            fault = Fault(operation=operation, nth=nth, error=next(turns), persistent=persistent)
            found = failing(base, scratch, fault, verb)[0]
            errors += found is not None
            assert not isinstance(found, StorageFullError) or fault.error in FULL, fault
    assert errors >= len(OPERATIONS), "most faults are told"


def test_is_the_failing_lock_of_the_active_store_an_error_of_the_store(
    base: Base, scratch: str
) -> None:
    """Once the operating system's own came out, with a traceback."""
    fault = Fault(operation="open", nth=1, error=errno.EIO, path_contains="active/locks/branch-")
    error, _ = failing(base, scratch, fault)
    assert isinstance(error, StorageFailedError)
    assert "locking branch" in str(error)


def test_is_a_commit_seen_at_once_where_no_reader_can_be_asked(scratch: str) -> None:
    """The list of leases failed after the commit point: once its own store did not show it."""
    place = Path(scratch)
    files = RecordingFileSystem(scratch)
    with shardb.open(place / "run", create=True, files=files) as store:
        commit_step(store, 0)
        files._fault = Fault(
            operation="list", nth=1, error=errno.EIO, persistent=True, path_contains="/leases"
        )
        commit_step(store, 1)
        assert store.resolve().step == 1
        files._fault = None
        commit_step(store, 2)
        assert [commit.step for commit in store.commits()] == [1, 2]


def test_is_a_commit_published_once_whose_index_was_behind(scratch: str) -> None:
    """It had landed, the index had not seen it, and it was copied again: once a conflict."""
    place = Path(scratch)
    files = RecordingFileSystem(scratch)
    with (
        shardb.open(place / "active", create=True) as active,
        shardb.open(place / "run", create=True, files=files) as durable,
    ):
        commit_step(active, 0)
        with Publisher(active, durable) as publisher:
            publisher.publish()
            publisher.wait()
            head = commit_step(active, 1)
            with mock.patch.object(durable.index, "write", side_effect=OSError(errno.EIO, "read")):
                publisher.publish(head)
                publisher.wait()
            assert durable.resolve().step == 0, "it was made to be behind"
            publisher.publish(head)
            assert publisher.wait() == 1
        told = [record["step"] for record in durable.history() if record["kind"] == "commit"]
        assert told == [0, 1]
