"""`make callfaults`: let the kernel fail one system call of a real `train`; what comes of it?

`make faults` fails calls at the store's seam. Below that and beside it are LMDB, the step log, the
file of an active store's place and the ceiling: here strace fails the n-th call of a thread that is
about the store, with an error of a list, once or from then on. The command has to end with the exit
code of that error and in words, or well; the same call made again has to end well, with the shards
of a run that was never disturbed, a step log that has each step once, and a store without findings.
It needs strace, and the right to trace: without them it says so and skips.

Exit codes: 0 nothing was wrong, or skipped; 1 something was; 2 usage; 130 and 143 interrupted.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import shardb
from shardb.cli import run as shardb_run
from tests.support.training import arguments, make_data, train_here
from tools.crash_devices import SkippedError

CALLS: dict[str, tuple[str, ...]] = {
    "openat": ("EMFILE", "ENOMEM", "EINTR", "EIO"),
    "mmap": ("ENOMEM",),
    "flock": ("EINTR", "ENOMEM", "EIO"),
    "pwrite64": ("ENOSPC", "EDQUOT", "EINTR", "EIO"),
    "write": ("ENOSPC", "EDQUOT", "EINTR", "EIO"),
    "ftruncate": ("ENOSPC", "EDQUOT", "EINTR"),
    "fallocate": ("ENOSPC", "EDQUOT", "EINTR"),
    "mkdir": ("ENOSPC", "EDQUOT"),
    "rename": ("ENOSPC", "EDQUOT", "EIO"),
    "fdatasync": ("ENOSPC", "EDQUOT", "EIO"),
    "fsync": ("ENOSPC", "EDQUOT", "EIO"),
    "msync": ("EIO",),
}
# From then on, too: a disk that is full stays full.
LASTING = ("ENOSPC", "EDQUOT")
SYNCS = ("fdatasync", "fsync", "msync")
FULL, FAILED = 6, 7
LIMIT_SECONDS = 120
STEPS = 3
ENTRY = re.compile(r"^(\d+) +(\w+)\((.*)$")
NOTED = ("--validate-every", "2", "--save-every", "2", "--max-steps", str(STEPS))


@dataclass(frozen=True, kw_only=True)
class Point:
    """The `nth` call of a thread, what it was about in an undisturbed run, and what it gives."""

    call: str
    nth: int
    about: str
    error: str
    lasting: bool

    def __str__(self) -> str:
        how = "on" if self.lasting else ""
        return f"{self.call} {self.nth}{how} ({self.about}) gives {self.error}"

    @property
    def kind(self) -> tuple[str, str, str, bool]:
        """What it has in common with calls about other files of the same kind."""
        about = re.sub(r"[0-9a-f]{16,}|[0-9]+", "#", self.about)
        return self.call, about, self.error, self.lasting

    @property
    def allowed(self) -> tuple[int, ...]:
        """The exit codes that fit: a sync that fails is a failure, whatever its reason."""
        if self.error not in LASTING:
            return 0, FAILED
        return (0, FULL, FAILED) if self.call in SYNCS else (0, FULL)


def in_turn(points: Sequence[Point], seed: int) -> list[Point]:
    """Order faults by chance, but one of each kind before the second of any."""
    drawn = random.Random(seed).sample(points, len(points))
    met: Counter[tuple[str, str, str, bool]] = Counter()
    turns = []
    for point in drawn:
        met[point.kind] += 1
        turns.append(met[point.kind])
    return [point for _, point in sorted(zip(turns, drawn, strict=True), key=lambda pair: pair[0])]


class Bench:
    """A scratch folder with data, and the digests of a run that was never disturbed."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.store = scratch / "disturbed"
        self.data = make_data(scratch / "data", rows=40)
        self._words = arguments(
            self.store, self.data, "--val-data-dir", str(self.data / "val"), *NOTED
        )
        with redirect_stdout(StringIO()) as told, redirect_stderr(told):
            assert train_here(self._words) == 0, told.getvalue()
        self.digests = self._found()
        shutil.rmtree(self.store)

    def points(self) -> list[Point]:
        """Trace an undisturbed run; every fault that some call of it about the store can have."""
        trace = self._traced()[2]
        shutil.rmtree(self.store)
        found: dict[tuple[str, int], str] = {}
        counts: Counter[tuple[str, str]] = Counter()
        for line in trace.splitlines():
            if (entry := ENTRY.match(line)) is None:
                continue
            thread, call, words = entry.groups()
            counts[thread, call] += 1
            if str(self.store) in words:
                found.setdefault((call, counts[thread, call]), self._about(words))
        return [
            Point(call=call, nth=nth, about=about, error=error, lasting=lasting)
            for (call, nth), about in sorted(found.items())
            for error in CALLS[call]
            for lasting in ((False, True) if error in LASTING else (False,))
        ]

    def wrong(self, point: Point) -> list[str] | None:
        """Disturb a run, and go on with it; nothing where no call about the store was hit."""
        code, said, trace = self._traced(point)
        hit = [line for line in trace.splitlines() if "(INJECTED)" in line]
        aside = [line for line in hit if str(self.store) not in line]
        reasons = None
        if hit and not aside:
            reasons = [*wrong_end(point, code, said), *self.wrong_afterwards()]
        shutil.rmtree(self.store, ignore_errors=True)
        return reasons

    def wrong_afterwards(self) -> list[str]:
        """Make the same call again, and say what is wrong with where it comes to."""
        with redirect_stdout(StringIO()) as told, redirect_stderr(told):
            code = train_here(self._words)
            fsck = shardb_run(["fsck", str(self.store)])
        if code or fsck:
            return [f"afterwards train ends with {code}, fsck {fsck}: {told.getvalue()[-800:]}"]
        reasons = [] if self._found() == self.digests else ["afterwards other shards are there"]
        lines = (self.store / "logs" / "steps.jsonl").read_text().splitlines()
        steps = [json.loads(line)["step"] for line in lines]
        return reasons if steps == list(range(1, STEPS + 1)) else [*reasons, f"logged: {steps}"]

    def _traced(self, point: Point | None = None) -> tuple[int, str, str]:
        """Run `train` under strace; its exit code, what it said, and its calls."""
        file = self.scratch / "trace"
        words = ["strace", "-f", "-y", "-qq", "--seccomp-bpf", "-o", str(file)]
        words += ["-e", f"trace={','.join(CALLS)}"]
        if point is not None:
            when = f"{point.nth}{'+' if point.lasting else ''}"
            words += ["-e", f"inject={point.call}:error={point.error}:when={when}"]
        train = [sys.executable, "-c", "from trainer.cli import main; main()", *self._words]
        try:
            ended = subprocess.run(
                [*words, *train], capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
            )
        except FileNotFoundError as error:
            raise SkippedError("strace is not installed") from error
        except subprocess.TimeoutExpired:
            return -1, f"no end within {LIMIT_SECONDS} s", file.read_text()
        if "ptrace" in ended.stderr and "not permitted" in ended.stderr:
            raise SkippedError("tracing is refused here")
        return ended.returncode, ended.stderr, file.read_text(errors="replace")

    def _found(self) -> dict[str, str]:
        with shardb.open(self.store) as opened:
            commit = opened.branches()["main"]
            return {name: entry.digest for name, entry in commit.shards.items()}

    def _about(self, words: str) -> str:
        below = words.split(str(self.store), 1)[1]
        return re.split(r'[">]', below)[0].lstrip("/") or "."


def wrong_end(point: Point, code: int, said: str) -> list[str]:
    """Say what is wrong with how a disturbed run ended."""
    reasons = []
    if code not in point.allowed:
        reasons.append(f"exit code {code}: {said[-800:]}")
    if "Traceback" in said or "Exception ignored" in said:
        reasons.append(f"a traceback: {said[-2500:]}")
    if code and "error:" not in said:
        reasons.append(f"no word of what was wrong: {said[-300:]!r}")
    return reasons


def main(words: Sequence[str] | None = None) -> int:
    """Draw points and disturb a run at each, for as long as was asked for."""
    given = _arguments(words)
    counts: Counter[str] = Counter()
    scratch = Path(tempfile.mkdtemp(prefix="shardb-calls-", dir=given.scratch))
    try:
        bench = Bench(scratch)
        points = [p for p in bench.points() if not given.call or p.call in given.call]
        kinds = len({point.kind for point in points})
        print(f"{len(points):,} faults of a run, of {kinds:,} kinds", file=sys.stderr)
        began = time.monotonic()
        for number, point in enumerate(in_turn(points, given.seed), start=1):
            if time.monotonic() - began > given.minutes * 60:
                break
            reasons = bench.wrong(point)
            counts["not met" if reasons is None else point.error] += 1
            counts["violations"] += bool(reasons)
            for reason in reasons or ():
                print(f"{number}: {point}: {reason}", flush=True)
    except SkippedError as reason:
        print(f"callfaults: skipped: {reason}")
        return 0
    except KeyboardInterrupt:
        print("callfaults: interrupted", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(scratch)
        print(", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())))
    return 1 if counts["violations"] else 0


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    text = __doc__ or ""
    parser = argparse.ArgumentParser(
        description=text.split("\n")[0], epilog=text.rpartition("\n\n")[2]
    )
    parser.add_argument("--call", action="append", choices=sorted(CALLS), help="only this one")
    parser.add_argument("--seed", type=int, default=0, help="in which order")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long, at most about")
    parser.add_argument("--scratch", help="directory for the runs")
    return parser.parse_args(words)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves through `finally`
    sys.exit(main())
