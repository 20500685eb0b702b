"""Stopped before any operation, all later ones refused: is the directory left behind a store?"""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

import shardb
from shardb.testing.disk import DiskState
from shardb.testing.model import Expectation, Journal, ModelStore
from shardb.testing.operations import Crash, Kind
from shardb.testing.oracle import check, observe
from shardb.testing.recording import Past, RecordingFileSystem
from shardb.testing.workloads import commits

OPERATIONS_MAX = 1_000


def _position(files: RecordingFileSystem) -> int:
    return len(files.operations)


def test_what_a_killed_process_left_is_durable_once_the_store_is_open(scratch: str) -> None:
    """Written, renamed or appended and not yet synced: the next process sees it all the same."""
    recorded = RecordingFileSystem(scratch)
    commits(recorded, os.path.join(recorded.root, "run"), Journal(partial(_position, recorded)))
    recorded.shut_down()
    syncs = [o for o in recorded.operations if o.kind in (Kind.SYNC, Kind.SYNC_DIRECTORY)]
    assert len(syncs) > 20
    for sync in syncs:
        state, shown = _killed_and_opened(recorded, sync.number, scratch)
        unsafe = [str(o) for o in state.pending if o.path.endswith(".wal")]
        assert not unsafe, f"killed before [{sync}]: the log is open and not durable: {unsafe}"
        root = os.path.join(scratch, f"dark-{sync.number}")
        os.mkdir(root)
        state.image({}).materialise(root)
        wrong = check(os.path.join(root, "run"), Expectation(settled=shown, attempted=None))
        assert not wrong, f"killed before [{sync}], opened, then power loss: {wrong}"


def _killed_and_opened(
    recorded: RecordingFileSystem, number: int, scratch: str
) -> tuple[DiskState, ModelStore]:
    """Kill before an operation, open the store again; the disk then, and what was shown."""
    state = DiskState(recorded.initial)
    for operation in recorded.operations[:number]:
        state.advance(operation)
    root = os.path.join(scratch, f"killed-{number}")
    os.mkdir(root)
    state.image(state.everything()).materialise(root)
    for index in [i for i in recorded.index_images if i.number < number][-1:]:
        Path(root, index.path).write_bytes(index.data)
    past = Past(operations=recorded.operations[:number], entries=state.live_entries())
    files = RecordingFileSystem(root, past=past)
    with shardb.open(os.path.join(files.root, "run"), create=True, files=files) as store:
        shown = observe(store)
    files.shut_down()
    for operation in files.operations[number:]:
        state.advance(operation)
    return state, shown


def test_a_program_stopped_at_any_operation_leaves_a_store(scratch: str) -> None:
    """No clean-up on the way out of the stopped program may do harm."""
    stopped_count = 0
    for stop_at in range(OPERATIONS_MAX):
        root = os.path.join(scratch, "disk")
        os.mkdir(root)
        files = RecordingFileSystem(root, stop_at=stop_at)
        journal = Journal(partial(_position, files))
        path = os.path.join(files.root, "run")
        try:
            commits(files, path, journal)
        except Crash:
            stopped_count += 1
        files.shut_down()
        wrong = check(path, journal.at(len(files.operations)), replay=stop_at)
        assert not wrong, f"stopped at operation {stop_at}: {wrong}"
        shutil.rmtree(root)
        if not files.crashed:
            break
    assert stopped_count > 80
