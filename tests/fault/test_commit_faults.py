"""Any call may fail: is the error the store's own, the last commit intact, the store usable again?

Fails the first call of a kind, the second, and so on until none is left to fail, once and from then
on, over opening, reading, two commits and a snapshot.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator

import pytest

import shardb
from shardb.errors import (
    CommitUnknownError,
    ShardbError,
    StorageFailedError,
    StorageFullError,
)
from shardb.testing import faulting
from shardb.testing.bases import Base, write_index
from shardb.testing.faulting import Outcome, Steps, run_faulted
from shardb.testing.images import ImageLimits, choices
from shardb.testing.model import Expectation
from shardb.testing.operations import Fault, PageModel
from shardb.testing.oracle import check, observe
from shardb.testing.recording import RecordingFileSystem
from shardb.testing.workloads import Script

READS = ("open", "pread", "pread_into", "map", "status", "exists", "list", "lock", "close", "kind")
CHANGES = ("pwrite", "truncate", "allocate", "rename", "unlink", "make_directory")
SYNCS = ("fsync", "fdatasync", "sync_directory")
FULL = (errno.ENOSPC, errno.EDQUOT)
PLANS = [
    *((operation, code) for operation in READS for code in (errno.EIO, errno.EINTR)),
    *((operation, code) for operation in CHANGES for code in (errno.EIO, errno.ENOSPC)),
    *((operation, code) for operation in SYNCS for code in (errno.EIO, errno.ENOSPC)),
    ("open", errno.EMFILE),
    ("map", errno.ENOMEM),
    ("pwrite", errno.EINTR),
    ("pwrite", errno.EDQUOT),
    ("fdatasync", errno.EDQUOT),
]


def use(script: Script) -> None:
    """What the faulted runs do: read everything, commit, snapshot, commit."""
    observe(script.store)
    script.commit(3)
    script.snapshot("step-3")
    script.commit(4)


def faulted_runs(
    base: Base, scratch: str, make_fault: Callable[[int], Fault], steps: Steps = use
) -> Iterator[Outcome]:
    """One run for every call that can fail; what is wrong with the reopened store fails here."""
    for outcome, wrong in faulting.faulted_runs(base, scratch, make_fault, steps):
        yield outcome
        assert not wrong, f"{outcome.fault}, then {outcome.error}: {wrong}"


def _plan_name(plan: tuple[str, int]) -> str:
    return f"{plan[0]}-{errno.errorcode[plan[1]]}"


@pytest.mark.parametrize("persistent", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("plan", PLANS, ids=_plan_name)
def test_a_failing_call_loses_nothing(
    plan: tuple[str, int], persistent: bool, template: Base, scratch: str
) -> None:
    operation, code = plan

    def make(nth: int) -> Fault:
        return Fault(operation=operation, nth=nth, error=code, persistent=persistent)

    for outcome in faulted_runs(template, scratch, make):
        if outcome.error is None:
            continue
        assert str(outcome.error), outcome.fault
        if operation in SYNCS and isinstance(outcome.error, StorageFailedError):
            assert outcome.refused_afterwards, f"not poisoned: {outcome.fault}"
        if isinstance(outcome.error, StorageFullError):
            assert code in FULL, outcome.fault
            assert outcome.error.exit_code == 6


@pytest.mark.parametrize("operation", SYNCS)
def test_every_failing_sync_of_a_commit_is_an_error(
    operation: str, template: Base, scratch: str
) -> None:
    """A commit never returns after one of its syncs failed."""

    def make(nth: int) -> Fault:
        return Fault(operation=operation, nth=nth, error=errno.EIO)

    fired = 0
    for outcome in faulted_runs(template, scratch, make, lambda script: script.commit(3)):
        fired += 1
        assert isinstance(outcome.error, StorageFailedError), outcome.fault
    assert fired > 0 or operation == "fsync"


def test_a_failing_sync_of_the_commit_record_leaves_the_outcome_open(
    template: Base, scratch: str
) -> None:
    """The error says so, and the commit's id tells after reopening whether it landed."""
    unknown = 0

    def make(nth: int) -> Fault:
        return Fault(operation="fdatasync", nth=nth, error=errno.EIO, path_contains=".wal")

    for outcome in faulted_runs(template, scratch, make):
        if not isinstance(outcome.error, CommitUnknownError):
            continue
        unknown += 1
        assert not outcome.error.definite
        assert outcome.error.exit_code == 7
        with shardb.open(outcome.store) as store:
            landed = outcome.error.commit_id in [commit.id for commit in store.commits()]
            expected = 3 + unknown if landed else 1 + unknown
            assert store.resolve("main").step in (expected - 1, expected)
    assert unknown == 2


@pytest.mark.parametrize("pages", ["new", "old", "zero"])
@pytest.mark.parametrize("operation", ["fsync", "fdatasync"])
def test_power_loss_after_a_failed_sync(
    operation: str, pages: PageModel, template: Base, scratch: str
) -> None:
    """Whatever memory showed after the failure, a crash leaves a commit that was made."""
    states = 0

    def make(nth: int) -> Fault:
        return Fault(operation=operation, nth=nth, error=errno.EIO, pages=pages)

    limits = ImageLimits(exhaustive_operations=2, random_subsets=4, torn_writes=4)
    for outcome in faulted_runs(template, scratch, make):
        state = outcome.state()
        images = {
            image.key: (label, image)
            for label, choice in choices(state, limits=limits, seed=outcome.fault.nth)
            for image in [state.image(choice)]
        }
        for label, image in images.values():
            states += 1
            root = os.path.join(scratch, "crashed")
            os.mkdir(root)
            image.materialise(root)
            path = os.path.join(root, "run")
            write_index(path, outcome.index())
            wrong = check(path, outcome.expectation)
            assert not wrong, f"{outcome.fault}, then power loss, [{label}]: {wrong}"
            shutil.rmtree(root)
    assert states > 50 or operation == "fsync"


@pytest.mark.parametrize("short_bytes", [1, 100, 513])
@pytest.mark.parametrize("operation", ["pread", "pread_into", "pwrite"])
def test_short_transfers_are_gone_on_with(
    operation: str, short_bytes: int, template: Base, scratch: str
) -> None:
    fault = Fault(operation=operation, nth=1, short=short_bytes, persistent=short_bytes > 1)
    outcome = run_faulted(template, scratch, fault, use)
    assert outcome.error is None
    assert check(outcome.store, outcome.expectation) == []


def test_a_write_without_progress_is_a_full_disk(template: Base, scratch: str) -> None:
    def make(nth: int) -> Fault:
        return Fault(operation="pwrite", nth=nth, short=0)

    errors = [outcome.error for outcome in faulted_runs(template, scratch, make)]
    assert any(isinstance(error, StorageFullError) for error in errors)


def test_a_full_disk_says_what_is_needed_and_free(template: Base, scratch: str) -> None:
    fault = Fault(
        operation="pwrite", nth=1, error=errno.ENOSPC, persistent=True, path_contains="spare"
    )
    outcome = run_faulted(template, scratch, fault, use)
    assert isinstance(outcome.error, StorageFullError)
    assert "bytes are needed" in outcome.error.message
    assert "bytes are free" in outcome.error.message
    assert "previous commit is intact" in outcome.error.message


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
@pytest.mark.parametrize(
    "operation", ["open", "make_directory", "pwrite", "fsync", "rename", "sync_directory", "list"]
)
def test_a_failing_creation_can_be_repeated(operation: str, code: int, scratch: str) -> None:
    for nth in range(1, 100):
        root = os.path.join(scratch, str(nth))
        os.mkdir(root)
        files = RecordingFileSystem(root, fault=Fault(operation=operation, nth=nth, error=code))
        path = os.path.join(files.root, "run")
        absent = Expectation(settled=None, attempted=None)
        try:
            shardb.open(path, create=True, files=files).close()
        except ShardbError:
            assert check(path, absent) == []
        files.shut_down()
        if not files.fired_count:
            return
    pytest.fail("still failing")


def test_the_harness_notices_an_error_that_is_swallowed(
    template: Base, scratch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control arm: a store that goes on after a failed sync of the log must be caught."""
    commit = Script.commit

    def careless(self: Script, step: int) -> None:
        try:
            commit(self, step)
        except CommitUnknownError:
            self._journal.acknowledge()

    fault = Fault(
        operation="fdatasync",
        nth=2,
        error=errno.EIO,
        pages="old",
        path_contains=".wal",
    )
    monkeypatch.setattr(Script, "commit", careless)
    outcome = run_faulted(template, scratch, fault, lambda script: script.commit(3))
    assert check(outcome.store, outcome.expectation)
