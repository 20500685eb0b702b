"""`make crash`: take every file operation of every workload for the last one, and print the counts.

Each workload is recorded once on a simulated disk; every state that a crash may leave is built on a
RAM disk, opened, compared with a plain-dict model and checked with fsck. A violation is printed
with the command that finds it again. Interrupt it at any time: it leaves nothing behind.

Exit codes: 0 every state recovered; 1 violations; 2 usage; 130 and 143 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from shardb.testing.explorer import Counts, ExploreLimits, OnPoint, explore
from shardb.testing.images import ImageLimits
from shardb.testing.workloads import WORKLOADS

RAM_DISK = "/dev/shm"
EFFORTS: Mapping[str, ExploreLimits] = {
    "quick": ExploreLimits(
        images=ImageLimits(
            exhaustive_operations=3, random_subsets=3, single_operations=4, torn_writes=4
        ),
        recovery_every=1_000,
        kill_every=8,
        go_on_every=16,
        audit_every=4,
    ),
    "normal": ExploreLimits(),
    "thorough": ExploreLimits(
        images=ImageLimits(exhaustive_operations=10, random_subsets=64, torn_writes=96),
        earlier_indexes=4,
        recovery_every=60,
        kill_every=1,
    ),
}


def main() -> int:
    """Explore the workloads asked for, and report."""
    arguments = _arguments()
    parent = arguments.scratch or (RAM_DISK if os.access(RAM_DISK, os.W_OK) else None)
    scratch = tempfile.mkdtemp(prefix="shardb-crash-", dir=parent)
    results: dict[str, Any] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves through `finally` below
    try:
        for name in arguments.workload or sorted(WORKLOADS):
            for seed in range(arguments.seed, arguments.seed + arguments.seeds):
                results[f"{name}, seed {seed}"] = _explore(name, seed, scratch, arguments)
    except KeyboardInterrupt:
        print("crash: interrupted", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(scratch)
    states = sum(result["states"] + result["recovery_states"] for result in results.values())
    violations = sum(len(result["violations"]) for result in results.values())
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        print(f"{states} distinct states, {violations} violations")
    return 1 if violations else 0


def _explore(name: str, seed: int, scratch: str, arguments: argparse.Namespace) -> dict[str, Any]:
    start = time.monotonic()
    limits = EFFORTS[arguments.effort]
    counts = explore(
        WORKLOADS[name], scratch=scratch, limits=limits, seed=seed, on_point=_progress(name)
    )
    seconds = time.monotonic() - start
    if not arguments.json:
        _show(name, seed, counts, seconds, arguments.effort)
    return {
        "operations": counts.operations,
        "images": counts.images,
        "states": counts.states,
        "further_commits": counts.further_commits,
        "recoveries_crashed": counts.recoveries_crashed,
        "recovery_states": counts.recovery_states,
        "seconds": round(seconds, 1),
        "violations": [str(violation) for violation in counts.violations],
    }


def _progress(name: str) -> OnPoint | None:
    """On a terminal, a line that says how far a workload is."""
    if not sys.stderr.isatty():
        return None

    def show(point: int, counts: Counts) -> None:
        states = counts.states + counts.recovery_states
        end = "\n" if point == counts.operations else ""
        line = f"\r{name}: operation {point} of {counts.operations}, {states} states"
        print(line, end=end, file=sys.stderr, flush=True)

    return show


def _show(name: str, seed: int, counts: Counts, seconds: float, effort: str) -> None:
    print(f"{name}, seed {seed} ({seconds:.0f} s): {counts}", flush=True)
    for violation in counts.violations:
        print(f"  {violation}")
    if counts.violations:
        print(
            f"  again: python -m tools.crash --workload {name} --seed {seed} --effort {effort}",
            flush=True,
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog=(__doc__ or "").rpartition("\n\n")[2],
    )
    parser.add_argument(
        "--workload", action="append", choices=sorted(WORKLOADS), help="only this; may be repeated"
    )
    parser.add_argument("--effort", choices=sorted(EFFORTS), default="normal")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, one after another")
    parser.add_argument("--scratch", help="directory for the simulated disks; a RAM disk is best")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
