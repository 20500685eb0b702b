"""Is training in any mode through real stores resident training, bit for bit? A sample of cells.

Every pair of values of two factors occurs in the sample. `python -m tools.exactness` trains the
whole matrix.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.ram_disk import scratch_directory
from tools.exactness_cells import (
    GEOMETRIES,
    Cell,
    Reference,
    all_cells,
    covering_sample,
    geometries_met,
    spread_sample,
    uncovered_pairs,
    ways_of,
)
from tools.exactness_controls import CONTROLS, controls
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
from tools.exactness_runs import STEPS, Places, resident_trace, write_data
from tools.exactness_trace import Trace, differences

SEED = 3
SAMPLE = covering_sample(SEED)
VICTIM = next(cell for cell in SAMPLE if cell.store == "active" and cell.dtype == "fp16")


@pytest.fixture(scope="module")
def places() -> Iterator[Places]:
    """Give a folder on a disk, where the machine's scratch is one, and one on a RAM disk."""
    with tempfile.TemporaryDirectory() as disk, scratch_directory() as memory:
        data = write_data(Path(disk) / "data")
        yield Places(disk=Path(disk), memory=Path(memory), data=data)


@pytest.fixture(scope="module")
def traces() -> dict[Reference, Trace]:
    """Hold resident runs, each made once."""
    return {}


def trace_of(cell: Cell, places: Places, traces: dict[Reference, Trace]) -> Trace:
    if cell.reference not in traces:
        traces[cell.reference] = resident_trace(cell.reference, places.data, "cpu")
    return traces[cell.reference]


@pytest.mark.parametrize("cell", SAMPLE, ids=lambda cell: cell.name)
def test_a_cell_equals_resident_training(
    cell: Cell, places: Places, traces: dict[Reference, Trace]
) -> None:
    found = run_cell(cell, places, "cpu", trace_of(cell, places, traces))
    assert found.differences == []
    assert found.steps == STEPS


@pytest.mark.parametrize("control", CONTROLS)
def test_control_a_run_that_is_broken_is_noticed(
    control: str, places: Places, traces: dict[Reference, Trace]
) -> None:
    cell = next(cell for name, cell in controls() if name == control)
    reference = trace_of(cell, places, traces)
    assert run_control(control, cell, places, "cpu", reference).differences > 0


def test_killed_and_gone_on_is_never_killed(places: Places, traces: dict[Reference, Trace]) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tools.exactness_findings"])
    unbroken = run_cell(VICTIM, places, "cpu", trace_of(VICTIM, places, traces)).shards
    found = run_kill(context, VICTIM, places, "cpu", SEED, unbroken)
    assert found.differences == []
    assert found.kills >= 1
    control = run_kill_control(context, VICTIM, places, "cpu", unbroken)
    assert control.differences > 0, "going on at other rows was not noticed"


def test_every_pair_of_values_occurs_in_a_sample() -> None:
    assert uncovered_pairs(SAMPLE) == set()
    assert len(SAMPLE) < 15
    assert covering_sample(SEED) == SAMPLE
    assert any(covering_sample(seed) != SAMPLE for seed in range(SEED))


def test_control_a_sample_that_lacks_a_pair_is_noticed() -> None:
    for cell in SAMPLE:
        lone = [other for other in SAMPLE if other != cell]
        if uncovered_pairs(lone):
            break
    else:
        pytest.fail("no cell of the sample is needed")
    assert uncovered_pairs([cell for cell in all_cells() if cell.prefetch == "off"])


def test_the_matrix_is_whole_and_every_geometry_meets_every_value() -> None:
    cells = all_cells()
    references = sorted({cell.reference for cell in cells})
    assert (len(cells), len(set(cells)), len(references)) == (432, 432, 54)
    assert len(geometries_met(references)) == len(GEOMETRIES) * (3 + 3 + 2 + 3)
    decayed = {(each.weight_decay_scope, *met) for each in references for met in _met(each)}
    assert len(decayed) == 2 * (len(GEOMETRIES) + 3 + 3 + 2 + 3)
    for name, values in (("activation_placement", 4), ("prefetch_window", 3)):
        met = {(str(ways_of(c).get(name)), c.store, c.prefetch, c.optimizer) for c in cells}
        assert len(met) == values * 2 * 2 * 3, name
    assert sum(ways_of(c)["device_pipeline"] == "on" for c in cells) >= 48
    assert any(ways_of(c)["device_pipeline"] == "on" for _, c in controls())
    killed = spread_sample(0, 24)
    assert len(set(killed)) == 24
    assert uncovered_pairs(killed) == set()


def _met(reference: Reference) -> Iterator[tuple[str, Any]]:
    yield "geometry", reference.geometry
    for field in fields(reference):
        yield field.name, getattr(reference, field.name)


def test_a_trace_that_differs_anywhere_is_noticed(
    places: Places, traces: dict[Reference, Trace]
) -> None:
    trace = list(trace_of(SAMPLE[0], places, traces))
    last = trace[-1]
    [tensor, *_] = last.tensors
    [shard, *_] = last.shard_norms
    for other in (
        replace(last, loss=last.loss * (1 + 2e-16)),
        replace(last, batch=last.batch + 1),
        replace(last, shard_norms={**last.shard_norms, shard: 0.0}),
        replace(last, tensors={**last.tensors, tensor: ""}),
        replace(last, tensors={k: v for k, v in last.tensors.items() if k != tensor}),
    ):
        assert len(differences([*trace[:-1], other], trace)) == 1
    assert differences(trace[:-1], trace) != []
    assert differences(trace, trace) == []


def test_findings_hold_only_without_a_difference_and_with_every_control_noticed() -> None:
    cell = SAMPLE[0]
    equal = CellFinding(
        cell=cell,
        geometry=cell.reference.geometry,
        ways={},
        steps=STEPS,
        pipeline_steps=0,
        batches=STEPS + 2,
        tensors=10,
        clipped_steps=1,
        differences=[],
        seconds=1.0,
        shards={},
    )
    killed = KillFinding(cell=cell, kills=2, differences=[])
    noticed = ControlFinding(control="a stale buffer", cell=cell, differences=3)
    good = Findings(cells=[equal], kills=[killed], controls=[noticed], seconds=1.0)
    assert good.hold()
    assert "1 of 1 cells equal resident training" in good.table()
    for bad in (
        replace(good, cells=[replace(equal, differences=["step 3: loss"])]),
        replace(good, kills=[replace(killed, kills=0)]),
        replace(good, kills=[replace(killed, differences=["step 4: params/block_000"])]),
        replace(good, controls=[replace(noticed, differences=0)]),
    ):
        assert not bad.hold()
        assert any(cell.name in line for line in bad.table())
    assert not replace(good, not_run=1).hold()
    assert "shards" not in good.to_json()["cells"][0]
