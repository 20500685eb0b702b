"""What the exactness matrix found: one record a cell, a kill and a control, and their table.

Owns the work of one process and the words of the report. Knows nothing of processes or flags.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext

from tools.exactness_cells import FACTORS, Cell
from tools.exactness_controls import break_run
from tools.exactness_killed import killed, kills_of
from tools.exactness_runs import Places, streamed
from tools.exactness_trace import Trace, differences, shows_nothing

SHOWN = 20

Shards = Mapping[int, Mapping[str, str]]


@dataclass(frozen=True, kw_only=True)
class CellFinding:
    """A cell beside its reference; `shards` are the digests of its commits, by step."""

    cell: Cell
    geometry: str
    steps: int
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

    def hold(self) -> bool:
        """Say whether every cell and kill is equal, and every control was noticed."""
        found = (self.cells, self.kills, self.controls)
        return not any(each.is_wrong for kind in found for each in kind)

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
        return [
            f"{equal} of {len(self.cells)} cells equal resident training",
            f"{steps:,} steps, {values:,} tensors; {skipped:,} batches overflowed and were skipped",
            f"{gone_on} of {len(self.kills)} runs killed ({kills} times) equal those never killed",
            f"{noticed} of {len(self.controls)} controls noticed",
            f"{self.seconds:.0f} s",
        ]


def run_cell(cell: Cell, places: Places, device: str, reference: Trace) -> CellFinding:
    """Train a cell and compare it."""
    began = time.monotonic()
    found = streamed(cell, places.of_run(f"cell {cell.name}"), device)
    return CellFinding(
        cell=cell,
        geometry=cell.reference.geometry,
        steps=len(found.trace),
        batches=found.trace[-1].batch,
        tensors=len(found.trace[-1].tensors),
        clipped_steps=sum(each.clip_scale < 1.0 for each in found.trace),
        differences=differences(found.trace, reference)
        + found.faults
        + shows_nothing(found.trace, clip=cell.clip, dtype=cell.dtype),
        seconds=round(time.monotonic() - began, 2),
        shards=found.shards,
    )


def run_control(
    control: str, cell: Cell, places: Places, device: str, reference: Trace
) -> ControlFinding:
    """Train a cell with a mistake and count what the comparison sees."""
    found = streamed(
        cell,
        places.of_run(f"{control} {cell.name}"),
        device,
        sabotage=lambda run: break_run(run, control),
    )
    return ControlFinding(
        control=control, cell=cell, differences=len(differences(found.trace, reference))
    )


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
