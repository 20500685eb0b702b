"""Run the same few steps on a store while one of its file operations fails."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shardb.errors import ShardbError, StorageFailedError
from shardb.testing.disk import DiskState, Image
from shardb.testing.model import Expectation, Journal, ModelStore
from shardb.testing.operations import Fault
from shardb.testing.oracle import check, index_path, observe
from shardb.testing.recording import RecordingFileSystem
from shardb.testing.workloads import Script

CALLS_MAX = 1_000


@dataclass(frozen=True, kw_only=True)
class Template:
    """A closed store: its files, its index and what it holds."""

    image: Image
    index: bytes
    model: ModelStore


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one faulted run: the error that ended it, and what the disk may hold."""

    fault: Fault
    files: RecordingFileSystem
    error: ShardbError | None
    refused_afterwards: bool
    expectation: Expectation
    store: str

    def state(self) -> DiskState:
        """The simulated disk at the end of the run."""
        state = DiskState(self.files.initial)
        for operation in self.files.operations:
            state.advance(operation)
        return state

    def index(self) -> bytes | None:
        """The newest committed index of the run."""
        images = self.files.index_images
        return images[-1].data if images else None


def make_template(root: str) -> Template:
    files = RecordingFileSystem(root)
    journal = Journal(lambda: len(files.operations))
    with Script(files, f"{files.root}/run", journal) as script:
        script.commit(0)
        script.commit(1)
        script.snapshot("step-1")
        script.commit(2)
        model = script.model
    state = DiskState(files.initial)
    for operation in files.operations:
        state.advance(operation)
    index = Path(index_path(f"{files.root}/run")).read_bytes()
    return Template(image=state.image(state.everything()), index=index, model=model)


def use(script: Script) -> None:
    """What the faulted runs do: read everything, commit, snapshot, commit."""
    observe(script.store)
    script.commit(3)
    script.snapshot("step-3")
    script.commit(4)


def lay_out(image: Image, index: bytes | None, root: str) -> str:
    """Write a store below `root`; its path."""
    image.materialise(root)
    path = os.path.join(root, "run")
    if index is not None:
        Path(index_path(path)).write_bytes(index)
    return path


def run_faulted(
    template: Template, scratch: str, fault: Fault, steps: Callable[[Script], None] = use
) -> Outcome:
    """Open the store, do the steps, close it; every error must be the store's own.

    An error that is not definite leaves both outcomes open in the journal.
    """
    root = os.path.join(scratch, "faulted")
    os.mkdir(root)
    path = lay_out(template.image, template.index, root)
    files = RecordingFileSystem(root, fault=fault)
    start = Expectation(settled=template.model, attempted=None)
    journal = Journal(lambda: len(files.operations), start=start)
    error: ShardbError | None = None
    refused = False
    script: Script | None = None
    try:
        script = Script(files, path, journal, create=False)
        steps(script)
    except ShardbError as caught:
        error = caught
        if caught.definite:
            journal.refuse()
        refused = script is None or _refuses(script)
    if script is not None:
        script.close()
    files.shut_down()
    return Outcome(
        fault=fault,
        files=files,
        error=error,
        refused_afterwards=refused,
        expectation=journal.at(len(files.operations)),
        store=path,
    )


def _refuses(script: Script) -> bool:
    """Whether the open store refuses to write after a failure; one that never opened does."""
    try:
        script.store.begin().abort()
    except StorageFailedError:
        return True
    except ShardbError:
        return False
    return False


def faulted_runs(
    template: Template,
    scratch: str,
    make_fault: Callable[[int], Fault],
    steps: Callable[[Script], None] = use,
) -> Iterator[Outcome]:
    """One run for every call that can fail, until the fault no longer fires.

    What is wrong with the reopened store is asserted here; the run's files go afterwards.
    """
    for nth in range(1, CALLS_MAX):
        outcome = run_faulted(template, scratch, make_fault(nth), steps)
        fired = outcome.files.fired_count > 0
        if fired:
            yield outcome
            wrong = check(outcome.store, outcome.expectation, replay=nth)
            assert not wrong, f"{outcome.fault}, then {outcome.error}: {wrong}"
        shutil.rmtree(os.path.join(scratch, "faulted"))
        if not fired:
            assert outcome.error is None
            return
    raise AssertionError(f"still failing after {CALLS_MAX} calls")
