"""`make exactness`: is every way of training the same, bit for bit, as training with all in memory?

Trains each cell of {optimizer} x {clipping} x {accumulation} x {precision} x {prefetch} x {writes}
x {store} through real stores and compares every parameter, moment, loss and norm of every step with
resident training; kills some of them and goes on; and breaks some on purpose, which must be seen.

    python -m tools.exactness              the whole matrix, on the CPU
    python -m tools.exactness --sample     few cells, in which every pair of values occurs
    python -m tools.exactness --device cuda --jobs 14 --out exactness.json
    python -m tools.exactness --device cuda:0,cuda:1 --jobs 30       take turns on two GPUs
    python -m tools.exactness --device cuda --pipeline               what the pipeline trains

An interrupt lets the runs in work end, tells what was found, and removes what was written.

Exit codes: 0 no difference and every control was noticed; 1 a difference, a control that was
not noticed, or not everything was run; 2 usage; 130 interrupted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import random
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import torch

from tools.exactness_cells import (
    FACTORS,
    Cell,
    all_cells,
    covering_sample,
    spread_sample,
    ways_of,
)
from tools.exactness_controls import controls
from tools.exactness_findings import (
    CellFinding,
    ControlFinding,
    Findings,
    KillFinding,
    run_cell,
    run_control,
    run_kill,
    run_kill_control,
)
from tools.exactness_killed import leave_signals_to_parent
from tools.exactness_runs import Places, resident_trace, write_data

RAM_DISK = "/dev/shm"
KILLS_IN_SAMPLE = 2


class Progress:
    """One line about every two seconds: how far, how fast, how long still; and the time limit."""

    def __init__(self, limit_seconds: float) -> None:
        self.not_run = 0
        self.is_interrupted = False
        self._began = time.monotonic()
        self._limit_seconds = limit_seconds
        self._told = 0.0

    @property
    def seconds(self) -> float:
        """Give how long it has been."""
        return round(time.monotonic() - self._began, 1)

    def is_over(self) -> bool:
        """Say whether nothing more may begin."""
        return self.is_interrupted or self.seconds > self._limit_seconds

    def tell(self, what: str, done: int, total: int, began: float, wrong: int) -> None:
        """Print when it is time, and at the end."""
        now = time.monotonic()
        if now - self._told < 2.0 and done < total:
            return
        self._told = now
        rate = done / max(now - began, 1e-9)
        left = f"{(total - done) / rate:.0f} s left" if done else "beginning"
        print(
            f"{now - self._began:4.0f} s  {what}: {done} of {total}, {rate:.1f}/s, {left},"
            f" {wrong} wrong",
            file=sys.stderr,
            flush=True,
        )


def main() -> int:
    """Train, compare and report."""
    arguments = _arguments()
    scratch = Path(tempfile.mkdtemp(prefix="exactness-", dir=arguments.scratch))
    ram = RAM_DISK if os.access(RAM_DISK, os.W_OK) else None
    memory = Path(tempfile.mkdtemp(prefix="exactness-", dir=ram))
    progress = Progress(arguments.limit_seconds)
    try:
        places = Places(disk=scratch, memory=memory, data=write_data(scratch / "data"))
        findings = examine(arguments, places, progress)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)
    print("\n".join(findings.table()))
    if arguments.out:
        document = {"machine": _machine(arguments), **findings.to_json()}
        Path(arguments.out).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if progress.is_interrupted:
        return 130
    return 0 if findings.hold() else 1


def examine(arguments: argparse.Namespace, places: Places, progress: Progress) -> Findings:
    """Do everything that was asked for, in as many processes as were."""
    cells = covering_sample(arguments.seed) if arguments.sample else all_cells()
    if arguments.pipeline:
        cells = [cell for cell in cells if ways_of(cell)["device_pipeline"] == "on"]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tools.exactness_findings"])
    random.Random(arguments.seed).shuffle(cells)
    with ProcessPoolExecutor(
        arguments.jobs, mp_context=context, initializer=leave_signals_to_parent
    ) as pool:
        names = arguments.device.split(",")
        found, broken = _train_cells(pool, cells, places, names, progress)
    by_cell = {each.cell: each for each in found}
    count = min(arguments.kills, KILLS_IN_SAMPLE) if arguments.sample else arguments.kills
    victims = [by_cell[c] for c in _victims(cells, arguments.seed, count) if c in by_cell]
    with ThreadPoolExecutor(arguments.jobs) as threads:
        kills = [
            threads.submit(
                run_kill,
                context,
                each.cell,
                places,
                _device_of(each.cell, names),
                arguments.seed,
                each.shards,
            )
            for each in victims
        ]
        others = [
            threads.submit(
                run_kill_control,
                context,
                each.cell,
                places,
                _device_of(each.cell, names),
                each.shards,
            )
            for each in victims[:KILLS_IN_SAMPLE]
        ]
        killed = _gathered("killed and gone on", [*kills, *others], progress)
    return Findings(
        cells=found,
        kills=[each for each in killed if isinstance(each, KillFinding)],
        controls=broken + [each for each in killed if isinstance(each, ControlFinding)],
        seconds=progress.seconds,
        not_run=progress.not_run,
    )


def _train_cells(
    pool: Executor, cells: list[Cell], places: Places, names: list[str], progress: Progress
) -> tuple[list[CellFinding], list[ControlFinding]]:
    """Train the references, then what is compared with them."""
    devices = itertools.cycle(names)
    broken_cells = [cell for _, cell in controls()]
    references = sorted({cell.reference for cell in [*cells, *broken_cells]})
    resident = [pool.submit(resident_trace, r, places.data, next(devices)) for r in references]
    _gathered("resident runs", resident, progress)
    made = [each for each in zip(references, resident, strict=True) if not each[1].cancelled()]
    traces = {reference: future.result() for reference, future in made}
    wanted: list[Future[Any]] = [
        pool.submit(run_control, control, cell, places, next(devices), traces[cell.reference])
        for control, cell in controls()
        if cell.reference in traces
    ]
    wanted += [
        pool.submit(run_cell, cell, places, _device_of(cell, names), traces[cell.reference])
        for cell in cells
        if cell.reference in traces
    ]
    done = _gathered("cells and controls", wanted, progress)
    return (
        [each for each in done if isinstance(each, CellFinding)],
        [each for each in done if isinstance(each, ControlFinding)],
    )


def _device_of(cell: Cell, names: list[str]) -> str:
    """Give a cell's device: always the same one, for it is in the recipe that is compared."""
    return names[zlib.crc32(repr(cell).encode()) % len(names)]


def _gathered(what: str, futures: Iterable[Future[Any]], progress: Progress) -> list[Any]:
    """Wait for all that may still begin, telling how far they are; give the results in order."""
    asked = list(futures)
    began, waiting = time.monotonic(), set(asked)
    wrong = 0
    while waiting:
        try:
            done, waiting = wait_for(waiting, timeout=1.0, return_when="FIRST_COMPLETED")
        except KeyboardInterrupt:
            progress.is_interrupted, done = True, set()
        wrong += sum(getattr(each.result(), "is_wrong", False) for each in done)
        progress.tell(what, len(asked) - len(waiting), len(asked), began, wrong)
        if progress.is_over():
            cancelled = {each for each in waiting if each.cancel()}
            progress.not_run += len(cancelled)
            waiting -= cancelled
    return [each.result() for each in asked if each.done() and not each.cancelled()]


def _victims(cells: list[Cell], seed: int, count: int) -> list[Cell]:
    """Choose which cells are killed, of both kinds of store."""
    if len(cells) == len(all_cells()):
        return spread_sample(seed, count)
    kinds = [[cell for cell in cells if cell.store == store] for store in FACTORS["store"]]
    return [cell for pair in zip(*kinds, strict=False) for cell in pair][:count]


def _machine(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "device": arguments.device,
        "jobs": arguments.jobs,
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def _arguments() -> argparse.Namespace:
    description, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device", default="cpu", help="where stages compute: cpu, cuda, cuda:0,cuda:1"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--out", help="a JSON file for everything that was found")
    parser.add_argument("--sample", action="store_true", help="a covering sample of the cells")
    parser.add_argument(
        "--pipeline", action="store_true", help="only the cells that the device's pipeline trains"
    )
    parser.add_argument("--kills", type=int, default=24, help="how many cells are killed")
    parser.add_argument(
        "--limit-seconds", type=float, default=7200.0, help="begin nothing more after this"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the samples")
    parser.add_argument("--scratch", help="a folder on a disk, for the durable stores")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
