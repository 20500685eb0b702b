"""Stopped before any operation, all later ones refused: is the directory left behind a store?"""

from __future__ import annotations

import os
import shutil
from functools import partial

from shardb.testing.model import Journal
from shardb.testing.operations import Crash
from shardb.testing.oracle import check
from shardb.testing.recording import RecordingFileSystem
from shardb.testing.workloads import commits

OPERATIONS_MAX = 1_000


def _position(files: RecordingFileSystem) -> int:
    return len(files.operations)


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
