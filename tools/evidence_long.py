"""The long run: the recipe that the search chose, for as long as there was a GPU for it.

Owns its flags, its length, and what is made of it afterwards: the package of its best step, and
those of the mean of its last snapshots. How many steps there is time for is measured in the
warm-up, where the rate does not depend on them; then the run goes on with a fall of the rate that
ends with the last one. Steps are chosen by one half of the held-out documents; the other half, by
which nothing was chosen, is what the packages are measured on as `val`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.evidence_export import Export, export
from tools.evidence_mixtures import make_set
from tools.evidence_recipes import ROW_TOKENS, Arm, Scale
from tools.evidence_runs import Place, again_of, command_of, record_run, run, step_lines
from tools.evidence_search import Recipe, recipe_flags

# What the search found, carried over. Rate: 2.4e-3 at a width of 320 falls with it to 1e-3 of 768.
# Decay: the search has its best near 1 in 1,280 steps and near 2 in 2,560 of half the rows.
# Rows: at 32 a step would be bound by the link to the host: a fifth fewer tokens, by estimate.
LONG = Recipe(weight_decay=1.6, rate=1.2e-3, mixture="steep", batch_rows=64, schedule="linear to 0")
WARMUP_STEPS = 250
# Of the warm-up: so many steps are made to see how long one takes, of which the last half counts.
PROBE_STEPS = 100
# Also where a snapshot is pinned.
VALIDATE_EVERY = 250
# So many of the last snapshots are averaged.
AVERAGED = (2, 4)
# What exporting and measuring takes at the end, and what starting again does.
PACKAGE_SECONDS = 100.0
START_SECONDS = 30.0
# For what is not a step: validations, and steps that others slow down.
SPARE = 0.96


def long_arm(scale: Scale, steps: int) -> Arm:
    """Give the long run of so many steps."""
    flags = {
        **recipe_flags(LONG, LONG.rate, max(steps, WARMUP_STEPS)),
        **scheduled_tail(steps),
        "preset": "perkunas-v2.9-100m",
        "validate-every": 4 if scale.is_tiny else VALIDATE_EVERY,
        "snapshot-best": True,
        "snapshot-every": 4 if scale.is_tiny else VALIDATE_EVERY,
    }
    return replace(scale.arm("long", flags, steps), steps=steps)


def scheduled_tail(steps: int) -> dict[str, int]:
    """Give a warm-up that is the same for every length, and a fall that ends with the last step."""
    tokens = LONG.batch_rows * ROW_TOKENS
    fall = (steps - WARMUP_STEPS) * tokens
    return {"warmup-tokens": WARMUP_STEPS * tokens, "decay-tokens": max(tokens, fall)}


def steps_in(made: int, seconds: float, step_seconds: float) -> int:
    """Give the steps of a run that made some and has time left: as many as end with a snapshot."""
    steps = made + int(SPARE * seconds / step_seconds)
    return max(2, steps // VALIDATE_EVERY) * VALIDATE_EVERY


def long(place: Place, scale: Scale, limit: float) -> None:
    """Train, then export and measure the best step, and means of the last snapshots beside it."""
    ends_at = time.monotonic() + limit
    rows = place.memory / "set-long"
    parts = 400 if scale.is_tiny else 1
    place.record.write("set", **make_set(place.data, rows, LONG.mixture, parts))
    arm = _trained(replace(place, data=rows), scale, ends_at - PACKAGE_SECONDS)
    lines = step_lines(place.store(arm.name))
    if not any("validation_loss" in line for line in lines):
        place.record.write("skipped", run=arm.name, why="the run has no validated step")
        return
    wanted = exports(lines, arm, place.store(arm.name), rows / "report")
    left = ends_at - time.monotonic()
    with ThreadPoolExecutor(len(wanted)) as pool:
        for done in [pool.submit(export, each, place, scale, left) for each in wanted]:
            done.result()


def _trained(place: Place, scale: Scale, ends_at: float) -> Arm:
    """Make the first steps, see how long they take, and go on for as many as there is time for."""
    began = time.monotonic()
    probe = replace(long_arm(scale, 0), steps=12 if scale.is_tiny else PROBE_STEPS)
    run(command_of(probe, place), probe, place, limit_seconds=ends_at - began)
    lines = step_lines(place.store(probe.name))
    taken = [line["seconds"] for line in lines[len(lines) // 2 :]] or [1.0]
    left = ends_at - time.monotonic() - START_SECONDS
    steps = 24 if scale.is_tiny else steps_in(len(lines), left, statistics.median(taken))
    arm = long_arm(scale, steps)
    words = ["--max-steps", str(steps), "--decay-tokens", str(arm.flags["decay-tokens"])]
    left = ends_at - time.monotonic()
    code = run(again_of(arm, place, words), arm, place, limit_seconds=left)
    record_run(arm, place, code, time.monotonic() - began)
    return arm


def exports(
    lines: Sequence[Mapping[str, Any]], arm: Arm, store: Path, report: Path
) -> list[Export]:
    """Give the packages of a run: its best step, and the means of its last snapshots."""
    held = [line for line in lines if "validation_loss" in line]
    best = min(held, key=lambda line: line["validation_loss"])["step"]
    plain = Export(
        name="long-best",
        store=store,
        commits=[f"best-step-{best}"],
        data=report,
        batch_rows=int(arm.flags["micro-batch-size"]),
    )
    every = int(arm.flags["snapshot-every"])
    last = lines[-1]["step"] // every * every
    means = []
    for count in AVERAGED:
        steps = range(last - (count - 1) * every, last + 1, every)
        if steps[0] > 0:
            names = [f"step-{step}" for step in steps]
            mean = replace(plain, name=f"long-mean-{count}", commits=names, losses_alone=True)
            means.append(mean)
    return [plain, *means]
