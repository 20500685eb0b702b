"""Stopped before any operation, all later ones refused: is the directory left behind a store?"""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

import shardb
from shardb.testing.disk import DiskState
from shardb.testing.model import Journal
from shardb.testing.operations import Crash, Kind
from shardb.testing.oracle import check
from shardb.testing.recording import Past, RecordingFileSystem
from shardb.testing.workloads import commits

OPERATIONS_MAX = 1_000


def _position(files: RecordingFileSystem) -> int:
    return len(files.operations)


def test_what_a_killed_writer_left_in_the_log_is_made_durable(scratch: str) -> None:
    """A record that changes nothing too, before the next one can be durable without it."""
    recorded = RecordingFileSystem(scratch)
    commits(recorded, os.path.join(recorded.root, "run"), Journal(partial(_position, recorded)))
    recorded.shut_down()
    syncs = [o for o in recorded.operations if o.kind is Kind.SYNC and o.path.endswith(".wal")]
    assert len(syncs) > 8
    for sync in syncs:
        state = DiskState(recorded.initial)
        for operation in recorded.operations[: sync.number]:
            state.advance(operation)
        root = os.path.join(scratch, f"killed-{sync.number}")
        os.mkdir(root)
        state.image(state.everything()).materialise(root)
        past = Past(operations=recorded.operations[: sync.number], entries=state.live_entries())
        for index in [i for i in recorded.index_images if i.number < sync.number][-1:]:
            Path(root, index.path).write_bytes(index.data)
        files = RecordingFileSystem(root, past=past)
        shardb.open(os.path.join(files.root, "run"), files=files).close()
        files.shut_down()
        for operation in files.operations[sync.number :]:
            state.advance(operation)
        assert [str(o) for o in state.pending if o.path.endswith(".wal")] == []


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
