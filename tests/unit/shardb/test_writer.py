"""Does background work report its end, keep its limit and raise its failures?"""

from __future__ import annotations

import threading
import time

import pytest

from shardb.writer import BackgroundWriter


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_is_the_result_of_work_given(threads: int) -> None:
    writer = BackgroundWriter(threads=threads, max_pending=2)
    futures = [writer.submit(lambda number=number: number * 2) for number in range(5)]
    assert [future.result() for future in futures] == [0, 2, 4, 6, 8]
    writer.close()
    assert writer.pending == 0


@pytest.mark.parametrize("threads", [0, 2])
def test_is_a_failure_raised_where_the_result_is_asked_for(threads: int) -> None:
    def fail() -> None:
        raise OSError("broken")

    writer = BackgroundWriter(threads=threads, max_pending=1)
    for _ in range(3):  # a failure gives its slot back
        with pytest.raises(OSError, match="broken"):
            writer.submit(fail).result()
    assert writer.pending == 0
    writer.close()


@pytest.mark.parametrize("threads", [0, 2])
def test_is_the_first_failure_of_many_raised_when_all_are_done(threads: int) -> None:
    done: list[int] = []

    def work(number: int) -> None:
        time.sleep(0.01)
        done.append(number)
        if number in (1, 2):
            raise ValueError(str(number))

    writer = BackgroundWriter(threads=threads, max_pending=1)
    with pytest.raises(ValueError, match="1"):
        writer.map(work, range(4))
    assert sorted(done) == [0, 1, 2, 3]
    writer.map(work, [0, 3])
    writer.close()


def test_does_a_full_queue_make_the_caller_wait() -> None:
    release = threading.Event()
    writer = BackgroundWriter(threads=1, max_pending=2)
    for _ in range(2):
        writer.submit(release.wait)
    third = threading.Thread(target=writer.submit, args=(release.wait,))
    third.start()
    third.join(timeout=0.1)
    assert third.is_alive()
    assert writer.pending == 2
    release.set()
    third.join()
    writer.close()


def test_is_work_after_the_end_refused_without_losing_a_slot() -> None:
    writer = BackgroundWriter(threads=1, max_pending=1)
    writer.close()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            writer.submit(lambda: None)
    assert writer.pending == 0
