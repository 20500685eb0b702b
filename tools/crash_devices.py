"""`make realfaults`: cut the power of a real file system, and fill real disks to the last byte.

Power: a run commits on ext4 in a loop file; at a random moment the file system is shut down without
flushing its journal, which loses what was not synced; mounted again, the store must be at a step
that was made, not below the last one told. Space: on a small tmpfs each verb runs with no byte
free, then with some more, until it ends well; its error must be the one for a full disk, and with
space again the store goes on. It needs the right to mount: without it, it says so and skips.

Exit codes: 0 nothing was lost, or skipped; 1 something was; 2 usage; 130 interrupted.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import shardb
from shardb.errors import ShardbError, StorageFullError
from shardb.testing.bases import Base
from shardb.testing.explorer import STORE
from shardb.testing.oracle import check
from shardb.testing.verbs import Scene, small_base
from tests.support.forked import Child, Tell
from tools.crash_campaign import ALL_VERBS
from tools.crash_kills import STEPS_MAX, LostError, World, reference_run, train
from tools.crash_training import TRAIN

# _IOR('X', 125, __u32), the same for ext4 and xfs.
SHUTDOWN = 0x8004587D
# Go down at once, and do not write the journal: what the device would have after a power cut.
WITHOUT_LOG_FLUSH = struct.pack("I", 2)
LOOP_BYTES = 96 << 20
SMALL_BYTES = 8 << 20
STEP_BYTES = 8 << 10
FREE_BYTES_MAX = 512 << 10
CUT_SECONDS = 0.4
UNMOUNT_ATTEMPTS = 50


class SkippedError(Exception):
    """This machine does not allow it; the message says what."""


@contextmanager
def mounted(place: Path, words: Sequence[str]) -> Iterator[Path]:
    """Mount something for the length of a block."""
    place.mkdir(exist_ok=True)
    if os.getuid() != 0 or shutil.which("mount") is None:
        raise SkippedError("only root can mount a file system")
    ended = subprocess.run(["mount", *words, str(place)], capture_output=True, check=False)
    if ended.returncode != 0:
        raise SkippedError(f"mounting is refused here: {ended.stderr.decode().strip()}")
    try:
        yield place
    finally:
        unmount_for_certain(place)


def unmount_for_certain(place: Path) -> None:
    """Unmount for certain: a second mount of a file that is still mounted would show two disks."""
    for _ in range(UNMOUNT_ATTEMPTS):
        gc.collect()  # views of objects map their files
        if subprocess.run(["umount", str(place)], capture_output=True, check=False).returncode == 0:
            return
        time.sleep(0.1)
    subprocess.run(["umount", "-l", str(place)], check=True)
    raise AssertionError(f"{place} stayed in use: what follows would say nothing")


# Power


def cut_power(place: Path) -> None:
    """Shut the file system of a directory down, its journal unwritten."""
    directory = os.open(place, os.O_RDONLY)
    try:
        fcntl.ioctl(directory, SHUTDOWN, WITHOUT_LOG_FLUSH)
    except OSError as error:
        raise SkippedError(f"the file system has no shutdown: {error.strerror}") from error
    finally:
        os.close(directory)


def make_loop_file(path: Path) -> None:
    """A file with an ext4 file system in it."""
    if shutil.which("mkfs.ext4") is None:
        raise SkippedError("mkfs.ext4 is not installed")
    with path.open("wb") as file:
        file.truncate(LOOP_BYTES)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(path)], check=True)


def power_cuts(scratch: Path, cuts: int, draw: random.Random) -> int:
    """Cut the power so often; the steps of all disks together. LostError says what was lost.

    A run that comes near its end is followed by another on a new disk.
    """
    reference = reference_run(scratch / "reference")
    steps, left = 0, cuts
    while left:
        make_loop_file(scratch / "disk.ext4")
        world = World(
            root=scratch / "mounted" / "run", medium="disk", writer="trainer", reference=reference
        )
        while left and world.told < STEPS_MAX - 1:
            _cut_once(scratch, world, draw)
            left -= 1
        steps += world.told
    return steps


def _cut_once(scratch: Path, world: World, draw: random.Random) -> None:
    """Let the run train, cut its power, and check what another mount finds."""
    words = ["-o", "loop", str(scratch / "disk.ext4")]
    with mounted(scratch / "mounted", words) as place:
        child = Child(lambda tell: _train_to_the_end(world.root, tell))
        if draw.random() < 0.8:
            child.first()
        time.sleep(draw.random() * CUT_SECONDS)
        cut_power(place)
        told = child.kill_after(0.0)
    world.told = max([world.told, *(number for number in told if number >= 0)])
    world.rounds += 1
    with mounted(scratch / "mounted", words):
        world.check({-number for number in told if number < 0})


def _train_to_the_end(root: Path, tell: Tell) -> None:
    """Train until the storage fails, as it does when its power is cut."""
    with suppress(ShardbError):
        train(root, "disk", tell)


# Space


def fill(place: Path, free_bytes: int) -> None:
    """Take all space but so many bytes."""
    size = 0
    with (place / "filler").open("wb", buffering=0) as file:
        for step in (1 << 16, 1 << 12):
            with suppress(OSError):
                while True:
                    size += file.write(bytes(step))
        file.truncate(max(0, size - free_bytes))


def run_full(base: Base, place: Path, verb: str, free_bytes: int) -> bool:
    """Run a verb with so little space, then check the store with enough; True when it was full.

    LostError says what is wrong.
    """
    root, side = place / "disk", f"{place}-beside"
    root.mkdir()
    try:
        files, journal = base.recording(str(root))
        fill(place, free_bytes)
        was_full = False
        scene: Scene | None = None
        try:
            scene = Scene(files, os.path.join(files.root, STORE), journal, create=False)
            scene.side = side
            ALL_VERBS[verb](scene)
        except StorageFullError:
            was_full = True
            journal.refuse()
        (place / "filler").unlink()
        if scene is not None:
            scene.close()
        files.shut_down()
        wrong = check(
            os.path.join(files.root, STORE), journal.at(len(files.operations)), replay=free_bytes
        )
        if wrong:
            raise LostError(f"{verb} with {free_bytes} bytes free: {wrong}")
    finally:
        shutil.rmtree(root)
        shutil.rmtree(side, ignore_errors=True)
    return was_full


def full_disks(
    scratch: Path, verbs: Sequence[str], draw: random.Random, passes: int
) -> Counter[str]:
    """Each verb with no space, a little more, and so on; then drawn amounts, again and again."""
    counts: Counter[str] = Counter()
    home = scratch / "base"
    home.mkdir()
    base = small_base(str(home))
    words = ["-t", "tmpfs", "-o", f"size={SMALL_BYTES}", "tmpfs"]
    with mounted(scratch / "small", words) as place:
        for verb in verbs:
            for free_bytes in range(0, FREE_BYTES_MAX, STEP_BYTES):
                counts[f"{verb}, runs"] += 1
                if not run_full(base, place, verb, free_bytes):
                    break
                counts[f"{verb}, full"] += 1
        for _ in range(passes):
            for verb in verbs:
                counts["drawn, runs"] += 1
                counts["drawn, full"] += run_full(base, place, verb, draw.randrange(128 << 10))
    return counts


# Both


def main() -> int:
    """Do both, and report."""
    arguments = _arguments()
    draw = random.Random(arguments.seed)
    failed = False
    for what in ("power", "space"):
        scratch = Path(tempfile.mkdtemp(prefix="shardb-devices-"))
        try:
            if what == "power":
                step = power_cuts(scratch, arguments.cuts, draw)
                print(f"power: cut {arguments.cuts} times, nothing lost; {step} steps were made")
            else:
                verbs = [verb for verb in sorted(ALL_VERBS) if verb != TRAIN]
                counts = full_disks(scratch, verbs, draw, arguments.passes)
                print("space: nothing lost; ", end="")
                print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
        except SkippedError as reason:
            print(f"{what}: skipped: {reason}")
        except (LostError, AssertionError, shardb.ShardbError) as error:
            failed = True
            print(
                f"{what}: {error}\n  again: python -m tools.crash_devices --seed {arguments.seed}"
            )
        except KeyboardInterrupt:
            print("realfaults: interrupted", file=sys.stderr)
            return 130
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog=(__doc__ or "").rpartition("\n\n")[2],
    )
    parser.add_argument("--cuts", type=int, default=100, help="how often to cut the power")
    parser.add_argument("--passes", type=int, default=10, help="passes of drawn fillings")
    parser.add_argument("--seed", type=int, default=0, help="of moments and fillings")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
