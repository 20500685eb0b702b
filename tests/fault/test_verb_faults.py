"""Any call may fail in any verb: is the error the store's own, and the store before or after it?

A drawn slice of `make faults`, which fails every call with every error: here each operation of the
seam that a verb uses fails a few times, and at its first and its last call.
"""

from __future__ import annotations

import errno
import random
import shutil
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from shardb.errors import ShardbError, StorageFullError
from shardb.gc import Collected
from shardb.testing import verbs
from shardb.testing.bases import Base
from shardb.testing.faulting import run_faulted, wrong_after
from shardb.testing.operations import Fault
from shardb.testing.verbs import VERBS, Scene, beside
from tools.crash_faults import ERRORS, OPERATIONS, SYNCS, TRANSFERS, faults

DRAWN = 2
# No call has its number: a run without a fault.
NEVER = 1 << 30


def calls_of(verb: str, base: Base, scratch: str) -> Counter[str]:
    """How often a verb, with opening and closing around it, calls each operation."""
    fault = Fault(operation="open", nth=NEVER, error=errno.EIO)
    outcome = run_faulted(base, scratch, fault, VERBS[verb])
    shutil.rmtree(outcome.files.root)
    shutil.rmtree(beside(outcome.files.root), ignore_errors=True)
    assert outcome.error is None
    return outcome.files.calls


def failing(verb: str, base: Base, scratch: str, fault: Fault) -> ShardbError | None:
    """Run a verb with a fault; the error, once the store that is left has been found right."""
    outcome = run_faulted(base, scratch, fault, VERBS[verb])
    wrong = wrong_after(outcome)
    shutil.rmtree(outcome.files.root)
    shutil.rmtree(beside(outcome.files.root), ignore_errors=True)
    assert not wrong, f"{verb}: {fault}, then {outcome.error}: {wrong}"
    return outcome.error


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_does_a_verb_survive_a_call_that_fails(verb: str, scene_base: Base, scratch: str) -> None:
    draw = random.Random(verb)
    calls = calls_of(verb, scene_base, scratch)
    errors: list[ShardbError] = []
    for operation in (*OPERATIONS, *SYNCS):
        count = calls[operation]
        drawn = {draw.randint(1, count) for _ in range(DRAWN)} if count else set()
        for nth in sorted(drawn | ({1, count} if count else set())):
            fault = Fault(
                operation=operation,
                nth=nth,
                error=draw.choice(ERRORS),
                persistent=draw.random() < 0.3,
                pages=draw.choice(("new", "old", "zero")),
            )
            error = failing(verb, scene_base, scratch, fault)
            errors += [error] if error is not None else []
            if isinstance(error, StorageFullError):
                assert fault.error in (errno.ENOSPC, errno.EDQUOT), fault
    assert len(errors) > 10, "faults of most calls are told"
    assert all(str(error) for error in errors)


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_does_a_verb_end_well_or_say_why_when_no_file_can_be_closed(
    verb: str, scene_base: Base, scratch: str
) -> None:
    """Out of a generator's finalizer nobody hears an error: there must be none."""
    fault = Fault(operation="close", nth=1, error=errno.EINTR, persistent=True)
    error = failing(verb, scene_base, scratch, fault)
    assert error is None or "Interrupted system call" in str(error)


def test_would_an_error_that_nobody_can_catch_be_noticed(scene_base: Base, scratch: str) -> None:
    """The control arm: one out of a finalizer, and one out of a thread."""

    def chunks() -> Iterator[bytes]:
        try:
            yield b"one"
        finally:
            raise InterruptedError(errno.EINTR, "closing")

    def fail() -> None:
        raise InterruptedError(errno.EINTR, "copying")

    def careless(scene: Scene) -> None:
        next(chunks())
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        scene.commit_next()

    outcome = run_faulted(
        scene_base, scratch, Fault(operation="open", nth=NEVER, error=errno.EIO), careless
    )
    wrong = wrong_after(outcome)
    shutil.rmtree(outcome.files.root)
    assert [reason.partition(":")[0] for reason in wrong] == ["nobody could catch it"] * 2


def test_do_the_loops_have_every_operation_and_error() -> None:
    listed = list(faults())
    assert {fault.operation for fault in listed} == {*OPERATIONS, *SYNCS}
    for persistent in (False, True):
        one = [fault for fault in listed if fault.persistent is persistent]
        assert {fault.error for fault in one if fault.short is None} == set(ERRORS)
        assert {fault.pages for fault in one if fault.operation in SYNCS} == {"new", "old", "zero"}
        assert {fault.operation for fault in one if fault.short} == set(TRANSFERS)


def test_would_a_verb_that_swallows_its_error_be_noticed(
    scene_base: Base, scratch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control arm: the second unlink of a collection fails, and what it has moved is lost."""

    def careless(root: str, **_: object) -> Collected:
        for path in sorted(verbs.QUICK.list(f"{root}/objects"))[:1]:
            verbs.QUICK.unlink(f"{root}/objects/{path}")
        return Collected(dry_run=False)

    monkeypatch.setattr(verbs, "collect_garbage", careless)
    fault = Fault(operation="unlink", nth=NEVER, error=errno.EIO)
    with pytest.raises(AssertionError, match="object_missing"):
        failing("gc", scene_base, scratch, fault)
