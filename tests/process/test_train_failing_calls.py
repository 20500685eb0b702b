"""Is a real `train` resumed after the kernel failed one of its calls, and would it be noticed?

A slice of `make callfaults`: a full disk for the index, which LMDB writes below the store's seam.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ram_disk import scratch_directory
from tools.crash_calls import FAILED, FULL, Bench, Point, in_turn, wrong_end
from tools.crash_devices import SkippedError


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """Give data, and a run that nobody disturbs."""
    with scratch_directory() as path:
        yield Bench(Path(path))


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_does_a_run_go_on_after_a_full_disk_below_the_seam_of_the_store(bench: Bench) -> None:
    try:
        points = bench.points()
    except SkippedError as reason:
        pytest.skip(str(reason))
    writes = [p for p in points if (p.call, p.about) == ("pwrite64", "index/data.mdb")]
    full = [p for p in writes if (p.error, p.lasting) == ("ENOSPC", False)]
    assert bench.wrong(full[-1]) == [], str(full[-1])


def point(nth: int, error: str, call: str = "pwrite64", about: str = "wal/1.wal") -> Point:
    return Point(call=call, nth=nth, about=about, error=error, lasting=False)


@pytest.mark.parametrize(
    ("error", "code", "said", "is_wrong"),
    [
        ("ENOSPC", 0, "", False),
        ("ENOSPC", FULL, "error: the disk is full", False),
        ("ENOSPC", FAILED, "error: it failed", True),
        ("EIO", FAILED, "error: it failed", False),
        ("EIO", 1, "Traceback (most recent call last)", True),
        ("EIO", FAILED, "it failed", True),
        ("EIO", -1, "error: no end", True),
    ],
)
def test_is_a_wrong_end_noticed(error: str, code: int, said: str, is_wrong: bool) -> None:
    assert bool(wrong_end(point(1, error), code, said)) is is_wrong


def test_may_a_sync_fail_for_any_reason() -> None:
    assert FAILED in point(1, "ENOSPC", call="fdatasync").allowed


def test_are_other_shards_noticed(bench: Bench) -> None:
    digests = bench.digests
    bench.digests = dict.fromkeys(digests, "0" * 32)
    assert bench.wrong_afterwards() == ["afterwards other shards are there"]
    bench.digests = digests
    assert bench.wrong_afterwards() == []
    shutil.rmtree(bench.store)


def test_has_each_kind_its_turn_before_the_second_of_any() -> None:
    points = [
        *(point(number, "EIO") for number in range(9)),
        point(1, "ENOSPC"),
        point(2, "EDQUOT"),
    ]
    first = in_turn(points, seed=1)[:3]
    assert {each.error for each in first} == {"EIO", "ENOSPC", "EDQUOT"}
    assert sorted(map(str, in_turn(points, seed=2))) == sorted(map(str, points))
    names = [point(1, "EIO", about=f"spare/staged.main.{name * 16}").kind for name in "ab"]
    assert names[0] == names[1]
