"""Does the background writer bound what waits, and write at once when it has no threads?"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import shardb
from shardb.writer import BackgroundWriter


def test_the_queue_is_bounded() -> None:
    writer = BackgroundWriter(threads=1, max_pending=2)
    go_on = threading.Event()
    first = writer.submit(go_on.wait)
    second = writer.submit(go_on.wait)
    third = threading.Thread(target=lambda: writer.submit(go_on.wait))
    third.start()
    third.join(0.05)
    assert third.is_alive(), "the third one has to wait"
    assert writer.pending == 2
    go_on.set()
    third.join()
    assert first.result()
    assert second.result()
    writer.close()
    assert writer.pending == 0


@pytest.mark.parametrize(("threads", "is_background"), [(0, False), (1, True)])
def test_without_threads_the_work_is_done_before_submit_returns(
    threads: int, is_background: bool
) -> None:
    writer = BackgroundWriter(threads=threads, max_pending=1)
    done = writer.submit(threading.current_thread)
    assert done.done() or is_background
    assert (done.result() is not threading.current_thread()) == is_background
    assert writer.pending == 0 or is_background
    writer.close()


def test_without_threads_a_failure_is_kept_for_the_one_who_asks() -> None:
    writer = BackgroundWriter(threads=0, max_pending=1)

    def fail() -> None:
        raise OSError("no medium")

    assert isinstance(writer.submit(fail).exception(), OSError)
    with pytest.raises(OSError, match="no medium"):
        writer.map(lambda _: fail(), [1])
    assert writer.pending == 0
    writer.close()


def test_a_sealed_shard_is_written_at_once(tmp_path: Path) -> None:
    with (
        shardb.open(tmp_path / "run", create=True, writer_threads=0) as store,
        store.begin() as txn,
    ):
        txn.write("params/a", {"x": np.arange(9.0)})
        assert txn.read("params/a").digest is not None
        assert txn.commit(step=0).step == 0
