"""`make crash`: take every file operation of every workload for the last one, and print the counts.

Workloads are recorded on a simulated disk: some written by hand, and every sequence of one to three
verbs of {commit, snapshot, branch, rewind, rm, gc, publish, rotate, pack, repair} and the trainer's
step. Every state that a crash may leave is built on a RAM disk, opened, compared with a plain-dict
model and checked with fsck. A violation is printed with the command that finds it again. Interrupt
it at any time: it leaves nothing but the file from which the same command goes on.

Exit codes: 0 every state recovered; 1 violations; 2 usage; 130 and 143 interrupted.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardb.testing.counts import Counts
from shardb.testing.explorer import ExploreLimits, OnPoint, explore
from shardb.testing.images import ImageLimits
from shardb.testing.workloads import WORKLOADS
from tools.crash_campaign import ALL_VERBS, QUICK, Campaign, Explorer, Sums, Task

RAM_DISK = "/dev/shm"
LINE_SECONDS = 30.0
# A recording is many small objects that live long: looking through them for rubbish costs a fifth.
RUBBISH_THRESHOLD = 50_000
EFFORTS: Mapping[str, ExploreLimits] = {
    "quick": QUICK,
    "normal": ExploreLimits(),
    "thorough": ExploreLimits(
        images=ImageLimits(exhaustive_operations=10, random_subsets=64, torn_writes=96),
        indexes="every",
        earlier_indexes=4,
        recovery_every=60,
        kill_every=1,
    ),
}


def main() -> int:
    """Explore what was asked for, by default the whole campaign, and report."""
    arguments = _arguments()
    parent = arguments.scratch or (RAM_DISK if os.access(RAM_DISK, os.W_OK) else None)
    scratch = tempfile.mkdtemp(prefix="shardb-crash-", dir=parent)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves through `finally` below
    try:
        if arguments.workload:
            return _explore_workloads(scratch, arguments)
        if arguments.sequence:
            return _explore_sequence(scratch, arguments)
        return _run_campaign(scratch, arguments)
    except KeyboardInterrupt:
        print("crash: interrupted; the same command goes on", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(scratch)


# The campaign


def _run_campaign(scratch: str, arguments: argparse.Namespace) -> int:
    campaign = Campaign(Path(arguments.file), seed=arguments.seed, states=arguments.states)
    if arguments.fresh and campaign.results:
        Path(arguments.file).unlink()
        campaign = Campaign(Path(arguments.file), seed=arguments.seed, states=arguments.states)
    progress = _CampaignProgress(campaign)
    for task in campaign.run(Explorer(scratch, arguments.seed), progress.finished):
        progress.begin(task)
    groups = campaign.sums()
    if arguments.json:
        print(json.dumps({name: vars(sums) for name, sums in groups.items()}, indent=2))
    else:
        _show_sums(groups)
    return 1 if groups["all"].violations else 0


class _CampaignProgress:
    """How far a campaign is: on a terminal one line that changes, else a line now and then."""

    def __init__(self, campaign: Campaign) -> None:
        self._campaign = campaign
        self._began = self._said = time.monotonic()
        self._states_before = campaign.states
        if campaign.results:
            print(f"goes on after {len(campaign.results)} workloads", file=sys.stderr)

    def begin(self, task: Task) -> None:
        """Say what is explored now."""
        live = sys.stderr.isatty()
        if not live and time.monotonic() - self._said < LINE_SECONDS:
            return
        self._said = time.monotonic()
        campaign = self._campaign
        seconds = time.monotonic() - self._began
        rate = (campaign.states - self._states_before) / max(seconds, 1e-9)
        left = max(0, campaign.states_wanted - campaign.states) / rate if rate else 0.0
        line = (
            f"{campaign.states:,} of {campaign.states_wanted:,} states, {rate:.0f}/s, "
            f"{left / 60:.0f} min left; workload {len(campaign.results) + 1} of "
            f"{len(campaign.tasks)}: {task.name}"
        )
        print(f"\r\x1b[K{line}" if live else line, end="" if live else "\n", file=sys.stderr)
        sys.stderr.flush()

    def finished(self, result: Mapping[str, Any]) -> None:
        """Show violations at once."""
        for violation in result["violations"]:
            print(f"{result['task']}: {violation}\n  again: {result['again']}", flush=True)


def _show_sums(groups: Mapping[str, Sums]) -> None:
    print("| workloads | how many | operations | states | recoveries crashed | violations |")
    print("|---|---|---|---|---|---|")
    for name, sums in sorted(groups.items(), key=lambda item: (item[0] == "all", item[0])):
        row = (name, sums.tasks, sums.operations, sums.states, sums.recoveries_crashed)
        cells = [f"{cell:,}" if isinstance(cell, int) else cell for cell in row]
        print(f"| {' | '.join(cells)} | {len(sums.violations)} |")
    for title, counted in (("disk", groups["all"].faults), ("index", groups["all"].indexes)):
        print(f"\n| {title} | states |\n|---|---|")
        for name, count in sorted(counted.items()):
            print(f"| {name} | {count:,} |")
    total = groups["all"]
    print(f"\n{total.states:,} distinct states, {len(total.violations)} violations", end="")
    print(f"; {total.processes_killed:,} recoveries of a process killed alone", end="")
    print(f", {total.seconds / 60:.0f} minutes")
    for violation in total.violations:
        print(violation)


# Single workloads


def _explore_sequence(scratch: str, arguments: argparse.Namespace) -> int:
    verbs = tuple(arguments.sequence.split(","))
    unknown = [verb for verb in verbs if verb not in ALL_VERBS]
    if unknown or not 1 <= len(verbs) <= 3:
        print(f"crash: --sequence takes 1 to 3 of {', '.join(sorted(ALL_VERBS))}", file=sys.stderr)
        return 2
    result = Explorer(scratch, arguments.seed).explore(
        Task(name=arguments.sequence, verbs=verbs),
        arguments.states,
        _progress(arguments.sequence),
        images=arguments.images,
        indexes=arguments.indexes,
    )
    if arguments.json:
        print(json.dumps(result, indent=2))
        return 1 if result["violations"] else 0
    states = result["states"] + result["recovery_states"]
    print(f"{arguments.sequence}: {states} distinct states, {len(result['violations'])} violations")
    for violation in result["violations"]:
        print(f"  {violation}\n  again: {result['again']}")
    return 1 if result["violations"] else 0


def _explore_workloads(scratch: str, arguments: argparse.Namespace) -> int:
    results: dict[str, Any] = {}
    for name in arguments.workload:
        for seed in range(arguments.seed, arguments.seed + arguments.seeds):
            results[f"{name}, seed {seed}"] = _explore(name, seed, scratch, arguments)
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
    return {**counts.to_json(), "seconds": round(seconds, 1)}


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


def _cache() -> str:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache, "shardb", "crash-campaign.jsonl")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog=(__doc__ or "").rpartition("\n\n")[2],
    )
    parser.add_argument("--states", type=int, default=200_000, help="how many, about, in all")
    parser.add_argument("--file", default=_cache(), help="where a campaign keeps how far it is")
    parser.add_argument("--fresh", action="store_true", help="begin the campaign anew")
    parser.add_argument("--sequence", help="only this one: 1 to 3 verbs with commas between them")
    parser.add_argument("--images", type=int, help="with --sequence: images of each operation")
    parser.add_argument(
        "--indexes", choices=("one", "two", "every"), help="with --sequence: of each image"
    )
    parser.add_argument(
        "--workload", action="append", choices=sorted(WORKLOADS), help="only this; may be repeated"
    )
    parser.add_argument(
        "--effort", choices=sorted(EFFORTS), default="normal", help="with --workload"
    )
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--seeds", type=int, default=1, help="with --workload: how many, one after another"
    )
    parser.add_argument("--scratch", help="directory for the simulated disks; a RAM disk is best")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    gc.set_threshold(RUBBISH_THRESHOLD)
    sys.exit(main())
