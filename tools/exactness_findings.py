"""What the exactness matrix found: one record a cell, a kill and a control, and their table.

Owns the work of one process and the words of the report. Knows nothing of processes or flags.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from multiprocessing.context import ForkServerContext
from typing import Any

from shardb.errors import ShardbError
from tools.exactness_cells import FACTORS, Cell, ways_of
from tools.exactness_controls import break_run
from tools.exactness_killed import killed, kills_of
from tools.exactness_runs import Places, Streamed, streamed
from tools.exactness_trace import Trace, differences, shows_nothing

SHOWN = 20

Shards = Mapping[int, Mapping[str, str]]


@dataclass(frozen=True, kw_only=True)
class CellFinding:
    """A cell beside its reference; `shards` are the digests of its commits, by step."""

    cell: Cell
    geometry: str
    ways: Mapping[str, Any]
    steps: int
    pipeline_steps: int
    batches: int
    tensors: int
    clipped_steps: int
    differences: list[str]
    seconds: float
    shards: Shards

    @property
    def is_wrong(self) -> bool:
        """Say whether anything differed."""
        return bool(self.differences)


@dataclass(frozen=True, kw_only=True)
class KillFinding:
    """A cell that was killed `kills` times, beside one that never was."""

    cell: Cell
    kills: int
    differences: list[str]

    @property
    def is_wrong(self) -> bool:
        """Say whether anything differed, or nothing was killed."""
        return bool(self.differences) or not self.kills


@dataclass(frozen=True, kw_only=True)
class ControlFinding:
    """A run that was broken on purpose, and how many differences were seen."""

    control: str
    cell: Cell
    differences: int

    @property
    def is_wrong(self) -> bool:
        """Say whether it went unnoticed."""
        return not self.differences


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Everything that one call found."""

    cells: list[CellFinding]
    kills: list[KillFinding]
    controls: list[ControlFinding]
    seconds: float
    not_run: int = 0

    def hold(self) -> bool:
        """Say whether all was run, every cell and kill is equal, and every control was noticed."""
        found = (self.cells, self.kills, self.controls)
        return not self.not_run and not any(each.is_wrong for kind in found for each in kind)

    def to_json(self) -> dict[str, Any]:
        """Give everything but the digests of shards."""
        return {
            "cells": [without(asdict(each), "shards") for each in self.cells],
            "kills": [asdict(each) for each in self.kills],
            "controls": [asdict(each) for each in self.controls],
            "seconds": self.seconds,
            "not_run": self.not_run,
        }

    def table(self) -> list[str]:
        """Give the report as lines."""
        return [*self._matrix(), *self._wrong(), *self._counts()]

    def _matrix(self) -> list[str]:
        """Equal cells of all cells, by what decides their bits: rows by columns of precision."""
        rows = [f"{'':24}" + "".join(f"{dtype:>9}" for dtype in FACTORS["dtype"])]
        counts: dict[tuple[str, str], list[bool]] = {}
        for each in self.cells:
            cell = each.cell
            row = f"{cell.optimizer:10}{cell.clip:8}x{cell.accumulation}"
            counts.setdefault((row, cell.dtype), []).append(not each.is_wrong)
        for row in dict.fromkeys(row for row, _ in counts):
            shown = [counts.get((row, dtype), []) for dtype in FACTORS["dtype"]]
            parts = (f"{sum(each)}/{len(each)}" if each else "-" for each in shown)
            rows.append(f"{row:24}" + "".join(f"{part:>9}" for part in parts))
        return rows

    def _wrong(self) -> list[str]:
        lines: list[str] = []
        runs: list[CellFinding | KillFinding] = [*self.cells, *self.kills]
        for each in runs:
            if each.is_wrong:
                kind = "killed" if isinstance(each, KillFinding) else "cell"
                lines.append(f"DIFFERENT {kind} {each.cell.name}: {len(each.differences)}")
                lines += [f"    {what}" for what in each.differences[:SHOWN]]
        lines += [
            f"UNNOTICED {each.control}: {each.cell.name}" for each in self.controls if each.is_wrong
        ]
        return lines

    def _counts(self) -> list[str]:
        equal = sum(not each.is_wrong for each in self.cells)
        steps = sum(each.steps for each in self.cells)
        skipped = sum(each.batches - each.steps for each in self.cells)
        values = sum(each.tensors * each.steps for each in self.cells)
        kills = sum(each.kills for each in self.kills)
        gone_on = sum(not each.is_wrong for each in self.kills)
        noticed = sum(not each.is_wrong for each in self.controls)
        through = sum(each.pipeline_steps for each in self.cells)
        late = [f"{self.not_run} were not run: the time was over"] if self.not_run else []
        return [
            *late,
            f"{equal} of {len(self.cells)} cells equal resident training",
            f"{steps:,} steps, {values:,} tensors; {skipped:,} batches overflowed and were skipped",
            f"{through:,} steps went through the device's pipeline",
            f"{gone_on} of {len(self.kills)} runs killed ({kills} times) equal those never killed",
            f"{noticed} of {len(self.controls)} controls noticed",
            f"{self.seconds:.0f} s",
        ]


def without(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Give a mapping without one of its entries."""
    return {key: value for key, value in values.items() if key != name}


def run_cell(cell: Cell, places: Places, device: str, reference: Trace) -> CellFinding:
    """Train a cell and compare it; an error of it is a difference."""
    began = time.monotonic()
    try:
        found = streamed(cell, places.of_run(f"cell {cell.name}"), device)
        unlike = [
            *differences(found.trace, reference),
            *found.faults,
            *shows_nothing(found.trace, clip=cell.clip, dtype=cell.dtype),
        ]
    except Exception as error:  # noqa: BLE001 - one cell's error ends none of the others
        found = Streamed(trace=[], shards={}, pipeline_steps=0)
        unlike = [f"{type(error).__name__}: {error}"]
    return CellFinding(
        cell=cell,
        geometry=cell.reference.geometry,
        ways=ways_of(cell),
        steps=len(found.trace),
        pipeline_steps=found.pipeline_steps,
        batches=found.trace[-1].batch if found.trace else 0,
        tensors=len(found.trace[-1].tensors) if found.trace else 0,
        clipped_steps=sum(each.clip_scale < 1.0 for each in found.trace),
        differences=unlike,
        seconds=round(time.monotonic() - began, 2),
        shards=found.shards,
    )


def run_control(
    control: str, cell: Cell, places: Places, device: str, reference: Trace
) -> ControlFinding:
    """Train a cell with a mistake and count what the comparison sees; an error is seen as well."""
    try:
        found = streamed(
            cell,
            places.of_run(f"{control} {cell.name}"),
            device,
            sabotage=lambda run: break_run(run, control),
        )
        seen = len(differences(found.trace, reference))
    except (AssertionError, ShardbError):
        seen = 1
    return ControlFinding(control=control, cell=cell, differences=seen)


def run_kill(
    context: ForkServerContext,
    cell: Cell,
    places: Places,
    device: str,
    seed: int,
    unbroken: Shards,
) -> KillFinding:
    """Kill a cell at random steps and compare its commits with those of its unbroken run."""
    found = killed(
        context,
        cell,
        places.of_run(f"killed {cell.name}"),
        device,
        kills=kills_of(cell, seed),
        unbroken=unbroken,
    )
    return KillFinding(cell=cell, kills=found.kills, differences=found.differences[:SHOWN])


def run_kill_control(
    context: ForkServerContext, cell: Cell, places: Places, device: str, unbroken: Shards
) -> ControlFinding:
    """Go on after a kill at other rows, which must be noticed."""
    found = killed(
        context,
        cell,
        places.of_run(f"control {cell.name}"),
        device,
        kills=kills_of(cell, 0, count=1),
        unbroken=unbroken,
        resumed_with={"skip_batches": 1},
    )
    return ControlFinding(
        control="gone on at other rows", cell=cell, differences=len(found.differences)
    )
