"""Fail the first call of a kind, the second, and so on until none is left to fail.

Owns one faulted run over a laid-out store, and the loop over all of them. Every error must be the
store's own; the store that is left must be the one before the call that failed or, where the error
is not definite, the one after it.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from shardb.errors import ShardbError, StorageFailedError
from shardb.testing.bases import Base
from shardb.testing.disk import DiskState
from shardb.testing.explorer import STORE
from shardb.testing.model import Expectation
from shardb.testing.operations import Fault
from shardb.testing.oracle import check
from shardb.testing.recording import RecordingFileSystem
from shardb.testing.verbs import Scene, beside

CALLS_MAX = 1_000
Steps = Callable[[Scene], object]
# Goes on with what lies below a directory, and says what is wrong with it.
GoesOn = Callable[[str], list[str]]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one faulted run: the error that ended it, and what the disk may hold.

    `stray` is an error that is not the store's own, `unheard` are those that nobody could catch,
    out of a finalizer or a thread: there must be none.
    """

    fault: Fault
    files: RecordingFileSystem
    error: ShardbError | None
    stray: Exception | None
    unheard: tuple[BaseException, ...]
    refused_afterwards: bool
    expectation: Expectation
    store: str

    def state(self) -> DiskState:
        """The simulated disk at the end of the run."""
        state = DiskState(self.files.initial)
        for operation in self.files.operations:
            state.advance(operation)
        return state

    def index(self) -> bytes:
        """The newest committed index of the run."""
        return self.files.index_images[-1].data


def run_faulted(base: Base, scratch: str, fault: Fault, steps: Steps) -> Outcome:
    """Open the store, do the steps, close it; every error must be the store's own.

    The caller removes what is left: the store, and what `beside` it a repair is helped with.
    """
    root = os.path.join(scratch, "faulted")
    os.mkdir(root)
    files, journal = base.recording(root, fault=fault)
    error: ShardbError | None = None
    stray: Exception | None = None
    refused = False
    scene: Scene | None = None
    store = os.path.join(files.root, STORE)
    with _overheard() as unheard:
        try:
            scene = Scene(files, store, journal, create=False)
            steps(scene)
        except ShardbError as caught:
            error = caught
            if caught.definite:
                journal.refuse()
            refused = scene is None or _refuses(scene)
        except Exception as caught:  # noqa: BLE001 - whatever else it is, it is wrong
            stray = caught
        if scene is not None:
            scene.close()
    files.shut_down()
    return Outcome(
        fault=fault,
        files=files,
        error=error,
        stray=stray,
        unheard=tuple(unheard),
        refused_afterwards=refused,
        expectation=journal.at(len(files.operations)),
        store=store,
    )


@contextmanager
def _overheard() -> Iterator[list[BaseException]]:
    """Errors that end in a finalizer or a thread, where they would only be printed."""
    heard: list[BaseException] = []

    def hear(told: Any) -> None:
        heard.append(told.exc_value)

    with (
        mock.patch.object(sys, "unraisablehook", hear),
        mock.patch.object(threading, "excepthook", hear),
    ):
        yield heard


def wrong_after(outcome: Outcome, *, goes_on: GoesOn | None = None) -> list[str]:
    """What is wrong with the error of a run, and with the store that it left.

    The store is gone on with by a further commit, or as `goes_on` does.
    """
    stray = outcome.stray
    wrong = [] if stray is None else [f"not the store's own error: {_place(stray)}"]
    wrong += [f"nobody could catch it: {_place(error)}" for error in outcome.unheard]
    replay = None if goes_on is not None else outcome.fault.nth
    wrong += check(outcome.store, outcome.expectation, replay=replay)
    if goes_on is not None and not wrong:
        wrong += goes_on(outcome.files.root)
    return wrong


def _place(error: BaseException) -> str:
    """An error and the innermost lines of the store where it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    named = [
        f"{os.path.basename(f.filename)}:{f.lineno}"
        for f in frames
        if "/testing/" not in f.filename
    ]
    return f"{error!r} in {' < '.join(reversed(named[-3:]))}"


def _refuses(scene: Scene) -> bool:
    """Whether the open store refuses to write after a failure; one that never opened does."""
    try:
        scene.store.begin().abort()
    except StorageFailedError:
        return True
    except ShardbError:
        return False
    return False


def faulted_runs(
    base: Base,
    scratch: str,
    make_fault: Callable[[int], Fault],
    steps: Steps,
    *,
    goes_on: GoesOn | None = None,
) -> Iterator[tuple[Outcome, list[str]]]:
    """One run for every call that can fail, until the fault no longer fires.

    Each comes with what is wrong with the store when it is opened again. Files go afterwards.
    """
    for nth in range(1, CALLS_MAX):
        outcome = run_faulted(base, scratch, make_fault(nth), steps)
        fired = outcome.files.fired_count > 0
        if fired:
            yield outcome, wrong_after(outcome, goes_on=goes_on)
        root = outcome.files.root
        shutil.rmtree(root)
        shutil.rmtree(beside(root), ignore_errors=True)
        if not fired:
            assert outcome.error is None, f"{outcome.error}, and no fault"
            assert outcome.stray is None, f"{outcome.stray!r}, and no fault"
            return
    raise AssertionError(f"still failing after {CALLS_MAX} calls")
