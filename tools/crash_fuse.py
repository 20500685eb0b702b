"""`make crash-fuse`: cut the power of a disk in user space, under a real trainer, again and again.

A run trains on a file system that notes what was synced. At a random moment its power is cut: of
what was not synced it keeps nothing, all, or any part, writes torn. The store must then be at a
step that was made, not below the last one told, with every snapshot. Here the index is torn too:
its library writes below the seam that the simulated crashes go through. First a disk that lies
about its syncs must lose something. Where the machine has no FUSE, it says so and skips.

Exit codes: 0 nothing was lost, or skipped; 1 something was; 2 usage; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import shardb
from shardb.errors import ShardbError
from tests.support.forked import Child, Tell
from tools.crash import RAM_DISK
from tools.crash_devices import SkippedError
from tools.crash_kills import STEPS_MAX, Digests, LostError, World, reference_run, train
from tools.fuse_disk import CUT_PREFIX, LossyDisk, require, served

CUT_SECONDS = 0.6
LYING_CUTS_MAX = 40


def cut_again_and_again(
    scratch: Path,
    reference: Sequence[Digests],
    cuts: int,
    draw: random.Random,
    *,
    lies: bool = False,
) -> int:
    """Cut the power so often; the steps of all disks together. LostError says what was lost."""
    steps, left = 0, cuts
    while left:
        disk = scratch / "disk"
        disk.mkdir()
        world = _world(scratch, reference)
        while left and world.told < STEPS_MAX - 1:
            _cut_once(scratch, world, draw, lies=lies)
            left -= 1
        steps += world.told
        shutil.rmtree(disk)
    return steps


def _world(scratch: Path, reference: Sequence[Digests]) -> World:
    root = scratch / "mounted" / "run"
    return World(root=root, medium="disk", writer="trainer", reference=reference)


def _cut_once(scratch: Path, world: World, draw: random.Random, *, lies: bool) -> None:
    """Let the run train, cut its power, and check what the next start of the disk finds."""
    place, disk, after = scratch / "mounted", scratch / "disk", scratch / "after"
    after.mkdir()
    with served(place, LossyDisk(disk, after, lies=lies)):
        child = Child(lambda tell: _train_to_the_end(world.root, tell))
        if draw.random() < 0.8:
            child.first()
        time.sleep(draw.random() * CUT_SECONDS)
        with suppress(OSError):
            os.stat(f"{place}{CUT_PREFIX}{draw.randrange(1 << 30)}")
        # What is mapped cannot be read any more: the kernel says so with SIGBUS, on any disk.
        told = child.kill_after(0.0, or_ended_by=signal.SIGBUS)
    shutil.rmtree(disk)
    after.rename(disk)
    world.told = max([world.told, *(number for number in told if number >= 0)])
    world.rounds += 1
    wrong = ""
    with served(place, LossyDisk(disk, scratch / "unused")):
        try:
            world.check({-number for number in told if number < 0})
        except (LostError, ShardbError) as error:
            wrong = str(error)  # its frames, which map files of the disk, must go before that
    if wrong:
        raise LostError(wrong)


def _train_to_the_end(root: Path, tell: Tell) -> None:
    """Train until the storage fails, as it does when its power is cut."""
    with suppress(ShardbError):
        train(root, "disk", tell)


def notices_a_lie(scratch: Path, reference: Sequence[Digests], draw: random.Random) -> bool:
    """The control arm: whether a disk that does no sync is found to lose something."""
    try:
        cut_again_and_again(scratch, reference, LYING_CUTS_MAX, draw, lies=True)
    except (LostError, ShardbError):
        return True
    return False


def main() -> int:
    """Cut, and report."""
    arguments = _arguments()
    draw = random.Random(arguments.seed)
    parent = RAM_DISK if os.access(RAM_DISK, os.W_OK) else None
    scratch = Path(tempfile.mkdtemp(prefix="shardb-fuse-", dir=parent))
    try:
        for part in ("lying", "honest"):
            (scratch / part).mkdir()
        require()
        reference = reference_run(scratch / "reference")
        if not notices_a_lie(scratch / "lying", reference, draw):
            print("fuse: a disk that does no sync lost nothing: this check would see nothing")
            return 1
        steps = cut_again_and_again(scratch / "honest", reference, arguments.cuts, draw)
    except SkippedError as reason:
        print(f"fuse: skipped: {reason}")
    except (LostError, AssertionError, shardb.ShardbError) as error:
        print(f"fuse: {error}\n  again: python -m tools.crash_fuse --seed {arguments.seed}")
        return 1
    except KeyboardInterrupt:
        print("fuse: interrupted", file=sys.stderr)
        return 130
    else:
        print(f"fuse: cut {arguments.cuts} times, nothing lost; {steps} steps were made")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog=(__doc__ or "").rpartition("\n\n")[2],
    )
    parser.add_argument("--cuts", type=int, default=100, help="how often to cut the power")
    parser.add_argument("--seed", type=int, default=0, help="of moments and of what is lost")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
