"""The long run: the recipe that the search chose, for as long as there was a GPU for it.

Owns its flags, and what is made of it afterwards: the package of its best step, and those of the
mean of its last snapshots. Steps are chosen by one half of the held-out documents; the other half,
by which nothing was chosen, is what the packages are measured on as `val`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.evidence_export import Export, export
from tools.evidence_mixtures import make_set
from tools.evidence_recipes import Arm, Scale
from tools.evidence_runs import Place, step_lines, train
from tools.evidence_search import Recipe, recipe_flags

# What the search found, carried over. Rate: 2.4e-3 at a width of 320 falls with it to 1e-3 of 768.
# Decay: the search has its best near 1 in 1,280 steps and near 2 in 2,560 of half the rows.
# Rows: at 32 a step is bound by the link to the host, and a fifth of the tokens would be lost.
LONG = Recipe(weight_decay=1.6, rate=1.2e-3, mixture="steep", batch_rows=64, schedule="linear to 0")
LONG_STEPS = 5000
# Also where a snapshot is pinned.
VALIDATE_EVERY = 250
# So many of the last snapshots are averaged.
AVERAGED = (2, 4)
# What exporting and measuring takes at the end.
PACKAGE_SECONDS = 110.0


def long_arm(scale: Scale) -> Arm:
    """Give the long run."""
    flags = {
        **recipe_flags(LONG, LONG.rate, LONG_STEPS),
        "preset": "perkunas-v2.9-100m",
        "validate-every": VALIDATE_EVERY,
        "snapshot-best": True,
        "snapshot-every": 4 if scale.is_tiny else VALIDATE_EVERY,
    }
    return scale.arm("long", flags, LONG_STEPS)


def long(place: Place, scale: Scale, limit: float) -> None:
    """Train, then export and measure the best step, and means of the last snapshots beside it."""
    ends_at = time.monotonic() + limit
    rows = place.memory / "set-long"
    parts = 400 if scale.is_tiny else 1
    place.record.write("set", **make_set(place.data, rows, LONG.mixture, parts))
    arm = long_arm(scale)
    train(arm, replace(place, data=rows), limit_seconds=limit - PACKAGE_SECONDS)
    lines = step_lines(place.store(arm.name))
    if not any("validation_loss" in line for line in lines):
        place.record.write("skipped", run=arm.name, why="the run has no validated step")
        return
    wanted = exports(lines, arm, place.store(arm.name), rows / "report")
    left = ends_at - time.monotonic()
    with ThreadPoolExecutor(len(wanted)) as pool:
        for done in [pool.submit(export, each, place, scale, left) for each in wanted]:
            done.result()


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
