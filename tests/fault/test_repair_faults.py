"""May a repair be stopped, or fail, at every single change, and be run again?"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardb.errors import ShardbError
from shardb.filesystem import RealFileSystem
from shardb.repair import repair
from shardb.repair_objects import Wishes
from shardb.repair_sources import StoreFiles
from tests.support import damage as d
from tests.support.damage import Known, check_repaired
from tests.support.small_stores import copy_store, fill_store

CHANGES = "pwrite truncate rename unlink make_directory fsync fdatasync sync_directory".split()
STOPS_MAX = 400


class Stopped(BaseException):
    """The process was killed here."""


class StoppingFiles(RealFileSystem):
    """Real files whose n-th change does not happen any more."""

    def __init__(self, last: int, fail: Callable[[], BaseException]) -> None:
        self.left = last
        self.fired = False
        for name in CHANGES:
            setattr(self, name, self._counted(getattr(super(), name), fail))

    def _counted(self, original: Callable[..., Any], fail: Callable[[], BaseException]) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if self.left == 0:
                self.fired = True
                raise fail()
            self.left -= 1
            return original(*arguments, **named)

        return call


def eio() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))


def enospc() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def both(*damages: d.Damage) -> d.Damage:
    def damage(root: Path) -> None:
        for one in damages:
            one(root)

    return damage


CASES: dict[str, tuple[d.Damage, dict[str, Any]]] = {
    "goes on from the index": (d.spoil_record(5), {}),
    "goes on past a hole": (d.without_index(d.spoil_record(5)), {}),
    "is cut": (d.spoil_record(-1), {"wishes": Wishes(cut=True)}),
    "is filled": (both(d.spoil_record(5), d.remove("index"), d.remove("FORMAT")), {"copy": True}),
    "objects are restored": (
        both(d.spoil_object(2, "params/a"), d.remove_object(6, "optim/a")),
        {"copy": True},
    ),
    "objects are given up": (
        both(d.spoil_object(2, "params/a"), d.spoil_object(6, "params/a"), d.remove("FORMAT")),
        {},
    ),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole") / "run"
    fill_store(root, range(7), snapshots=(2,))
    return root


FAULTS = {"killed": Stopped, "EIO": eio, "ENOSPC": enospc}
WAYS = [
    *[("killed", name) for name in CASES],
    *[(fault, name) for fault in ("EIO", "ENOSPC") for name in list(CASES)[:1] + list(CASES)[-1:]],
]


@pytest.mark.parametrize(("fault", "name"), WAYS)
def test_can_a_repair_be_done_again_wherever_it_ended(
    whole: Path, scratch: str, fault: str, name: str
) -> None:
    damage, how = CASES[name]
    place = Path(scratch)
    known = Known.of(whole)
    options = {key: value for key, value in how.items() if key != "copy"}
    if how.get("copy"):
        options["source"] = StoreFiles(RealFileSystem(), str(whole))
    damaged = copy_store(whole, place / "damaged")
    damage(damaged)
    for last in range(STOPS_MAX):
        run = copy_store(damaged, place / "run")
        files = StoppingFiles(last, FAULTS[fault])
        try:
            repair(str(run), yes=True, files=files, **options)
        except (Stopped, ShardbError):
            assert files.fired
        assert repair(str(run), yes=True, **options).remaining == (), f"stopped at change {last}"
        check_repaired(run, known)
        shutil.rmtree(run)
        if not files.fired:
            break
    else:
        pytest.fail("it never came to an end")
    shutil.rmtree(damaged)
    assert last > 3, "the control: a repair makes changes"
