"""Does a process that keeps the log's lock get named, instead of stopping everybody silently?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import shardb
from shardb.errors import ConflictError

HOLDER = """
import sys, time, shardb
store = shardb.open(sys.argv[1])
with store.locks.wal():
    print("held", flush=True)
    time.sleep(600)
"""


def test_is_a_stopped_holder_of_the_lock_named(tmp_path: Path) -> None:
    with shardb.open(tmp_path / "run", create=True) as store:
        with store.begin() as transaction:
            transaction.write("params/a", {"w": np.zeros(4, np.float32)})
            transaction.commit(step=1)
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
        )
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            os.kill(holder.pid, signal.SIGSTOP)
            store.locks.wait_seconds_max = 0.3
            with pytest.raises(
                ConflictError, match=f"process {holder.pid} has held the log's lock"
            ):
                store.create_snapshot("now")
            assert store.snapshots() == {}
        finally:
            holder.kill()
            holder.wait()
            if holder.stdout is not None:
                holder.stdout.close()
        assert store.create_snapshot("now").step == 1
