"""Does a disk in user space lose what was not synced, and nothing that was, and a store no step?

Its calls are made by hand; where the machine has FUSE and mfusepy, a few cuts are made for real.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tools import crash_fuse
from tools.crash_devices import SkippedError
from tools.crash_kills import STEPS_MAX, reference_run
from tools.fuse_disk import CUT_PREFIX, LossyDisk, require

CUTS = 3
SEEDS = range(40)


def after_cut(scratch: str, seed: int, *, lies: bool = False) -> dict[str, bytes]:
    """Write a file, sync it, and its name; write more, rename, and cut. What is left."""
    root = Path(scratch) / str(seed)
    for name in ("disk", "after"):
        (root / name).mkdir(parents=True)
    disk = LossyDisk(root / "disk", root / "after", lies=lies)
    file = disk.create("/one", 0o644)
    disk.write("/one", b"x" * 5000, 0, file)
    disk.fsync("/one", 1, file)
    disk.fsyncdir("/", 0, 0)
    disk.write("/one", b"y" * 5000, 5000, file)
    other = disk.create("/two", 0o644)
    disk.write("/two", b"z" * 100, 0, other)
    disk.rename("/two", "/three")
    with pytest.raises(OSError, match="Input/output error"):
        disk.getattr(f"{CUT_PREFIX}{seed}")
    with pytest.raises(OSError, match="Input/output error"):
        disk.read("/one", 1, 0, file)
    assert disk.getattr("/")["st_nlink"] > 0, "it can still be unmounted"
    for open_file in (file, other):
        disk.release("", open_file)
    return {path.name: path.read_bytes() for path in (root / "after").iterdir()}


def test_is_what_was_synced_there_and_the_rest_there_or_not(scratch: str) -> None:
    left = [after_cut(scratch, seed) for seed in SEEDS]
    assert all(files["one"][:5000] == b"x" * 5000 for files in left)
    assert {len(files["one"]) for files in left} >= {5000, 10_000}
    assert {frozenset(files) - {"one"} for files in left} >= {frozenset(), frozenset({"three"})}


def test_does_a_disk_that_lies_lose_what_was_synced(scratch: str) -> None:
    """The control arm."""
    left = [after_cut(scratch, seed, lies=True) for seed in SEEDS]
    assert any(files.get("one", b"")[:5000] != b"x" * 5000 for files in left)


def test_is_nothing_lost_under_a_real_trainer(scratch: str) -> None:
    try:
        require()
    except SkippedError as reason:
        pytest.skip(str(reason))
    reference = reference_run(Path(scratch) / "reference")
    draw = random.Random()
    steps = crash_fuse.cut_again_and_again(Path(scratch), reference, CUTS, draw)
    assert -CUTS <= steps <= CUTS * STEPS_MAX


def test_does_it_say_why_it_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os.path, "exists", lambda _: False)
    monkeypatch.setattr("sys.argv", ["crash_fuse"])
    assert crash_fuse.main() == 0
    assert capsys.readouterr().out == (
        "fuse: skipped: /dev/fuse is not there: the kernel has no FUSE\n"
    )
