"""The parts of the evidence: what each does with its runs, and how many seconds it may take.

Owns the parts and their order of steps. Knows nothing of which device a lane has, nor of drawing.
A part that is stopped has recorded every run that it ended, and the one in work as far as it got.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from tools.evidence_export import Export, export
from tools.evidence_long import long
from tools.evidence_recipes import (
    KILLED_STEPS,
    Arm,
    Scale,
    ablation_arms,
    brisk_arms,
    fields_of,
    hot_arms,
    main_arm,
    rate_arms,
    v25_arms,
)
from tools.evidence_runs import (
    Place,
    again_of,
    arms_at_once,
    command_of,
    copy_lines,
    output_of,
    record_commits,
    record_run,
    record_tensors,
    run,
    run_tool,
    step_lines,
    train,
)
from tools.evidence_search import search

KILLS = 3
CONTROL_STEPS = 40
RATES = (7.5e-4, 1.5e-3, 3e-3)
RATE_STEPS = 100
# Of the host's memory: others use the machine too.
ROOM_GIB = 64
# Arms of an ablation that train at once on one device: each is bound by the host for a part.
AT_ONCE = 4


@dataclass(frozen=True, kw_only=True)
class Part:
    """Something to show: what it does, what it is for, and the seconds it may take on a GPU."""

    name: str
    shows: str
    seconds: int
    make: Callable[[Place, Scale, float], None]


def rates(place: Place, scale: Scale, limit: float) -> None:
    """Search the peak rate: the main recipe over 100 steps, all rates at once."""
    _arms_at_once(rate_arms(scale, RATES, RATE_STEPS), place, limit, len(RATES))


def main(place: Place, scale: Scale, limit: float) -> None:
    """Train 3,000 steps; its stores stay for `package`."""
    arm = main_arm(scale)
    train(arm, place, limit_seconds=limit)
    record_commits(arm, place)
    record_tensors(arm, place)


def package(place: Place, scale: Scale, limit: float) -> None:
    """Export the best step, load it by transformers, measure it and let it write."""
    store = place.store("main")
    lines = [line for line in step_lines(store) if "validation_loss" in line]
    if not lines:
        place.record.write("skipped", why="the main run has no validated step")
        return
    best = min(lines, key=lambda line: line["validation_loss"])["step"]
    wanted = Export(
        name="main-best",
        store=store,
        commits=[f"best-step-{best}"],
        data=place.data,
        batch_rows=int(main_arm(scale).flags["micro-batch-size"]),
    )
    export(wanted, place, scale, limit)


def resident(place: Place, scale: Scale, limit: float) -> None:
    """Train the same recipe with everything in the device's memory."""
    arm = main_arm(scale)
    given = fields_of(arm.flags) | {"store": str(place.store("none"))}
    given["data_dir"] = str(place.data / "train")
    path, found = place.disk / "resident.json", place.disk / "resident.jsonl"
    path.write_text(json.dumps(_without_settings(given)))
    words = ["tools.evidence_resident", "--given", str(path), "--steps", str(arm.steps)]
    code = run_tool([*words, "--out", str(found)], place, "resident", limit)
    copy_lines(found, place, "ended", exit_code=code, said=output_of(place, "resident")[-600:])


def killed(place: Place, scale: Scale, limit: float) -> None:
    """Begin the main run once more, kill it three times, and let it reach step 300."""
    steps = 40 if scale.is_tiny else KILLED_STEPS
    _killed_and_recorded(replace(main_arm(scale), name="killed", steps=steps), place, limit, KILLS)


def control(place: Place, scale: Scale, limit: float) -> None:
    """Do the same with a run that passes over the rows of one step after it was killed."""
    steps = 10 if scale.is_tiny else CONTROL_STEPS
    arm = replace(main_arm(scale), name="killed-control", steps=steps)
    _killed_and_recorded(arm, place, limit, 1, "--skip-batches", "1")


def _killed_and_recorded(arm: Arm, place: Place, limit: float, count: int, *more: str) -> None:
    began = time.monotonic()
    code = _killed_run(arm, place, began + limit, count, more)
    record_run(arm, place, code, time.monotonic() - began)
    record_commits(arm, place)
    place.remove(arm.name)


def _killed_run(arm: Arm, place: Place, ends_at: float, count: int, more: Sequence[str]) -> int:
    steps = sorted(random.SystemRandom().sample(range(2, arm.steps - 2), count))
    words = command_of(arm, place)
    for step in steps:
        left = ends_at - time.monotonic()
        code = run(words, arm, place, limit_seconds=left, kill_step=step)
        reached = step_lines(place.store(arm.name))
        last = reached[-1]["step"] if reached else 0
        place.record.write("killed", run=arm.name, asked=step, exit_code=code, last_logged=last)
        words = again_of(arm, place, more)
    return run(again_of(arm, place, more), arm, place, limit_seconds=ends_at - time.monotonic())


def ablations(place: Place, scale: Scale, limit: float) -> None:
    """Train the arms of the source's roadmap on equal tokens, a few at once."""
    _arms_at_once(ablation_arms(scale), place, limit, AT_ONCE)


def hot(place: Place, scale: Scale, limit: float) -> None:
    """Train the guard's arms at twenty times the rate."""
    _arms_at_once(hot_arms(scale), place, limit, AT_ONCE)


def brisk(place: Place, scale: Scale, limit: float) -> None:
    """Train the guard's arms at five times the rate."""
    _arms_at_once(brisk_arms(scale), place, limit, AT_ONCE)


def probe(place: Place, scale: Scale, limit: float) -> None:
    """Begin one arm of each slow kind, to see how long its steps take."""
    wanted = {"fp16", "guard-moderate", "v25-bf16"}
    arms = [arm for arm in (*ablation_arms(scale), *v25_arms(scale)) if arm.name in wanted]
    _arms_at_once(arms, place, limit, len(arms))


def v25(place: Place, scale: Scale, limit: float) -> None:
    """Train the source's 291 M geometry by its recipe, in bf16 and for a few steps in fp16."""
    _arms_at_once(v25_arms(scale), place, limit, 2)


def memory(place: Place, scale: Scale, limit: float) -> None:
    """Search the largest resident model, and the most rows in each way, for capped devices."""
    _sizes("memory", place, scale, limit, "--caps", "0" if scale.is_tiny else "4,24,8,12")


def rows(place: Place, scale: Scale, limit: float) -> None:
    """Search the most rows in each way alone, what keeps everything first."""
    caps = "0" if scale.is_tiny else "8,12,24"
    ways = "whole,checkpointed,streamed"
    _sizes("rows", place, scale, limit, "--rows-alone", "--caps", caps, "--ways", ways)


def deep(place: Place, scale: Scale, limit: float) -> None:
    """Train a streamed model as large as the host has room for, on the smallest device."""
    caps = "0" if scale.is_tiny else "4"
    _sizes("deep", place, scale, limit, "--deep", "--caps", caps, "--room-gib", str(ROOM_GIB))


def _sizes(name: str, place: Place, scale: Scale, limit: float, *more: str) -> None:
    found = place.disk / f"{name}.jsonl"
    words = ["tools.evidence_memory", "--out", str(found), "--data", str(place.data)]
    words += ["--memory", str(place.memory), "--device", scale.device]
    words += ["--limit-seconds", str(min(limit, place.seconds_left()) - 15)]
    words += ["--tiny"] if scale.is_tiny else []
    code = run_tool([*words, *more], place, name, limit)
    copy_lines(found, place, "ended", exit_code=code, said=output_of(place, name)[-600:])


def _arms_at_once(arms: Sequence[Arm], place: Place, limit: float, count: int) -> None:
    arms_at_once([(arm, place) for arm in arms], limit, count)


def _without_settings(given: Mapping[str, object]) -> dict[str, object]:
    """Leave out what a resident run has no use for."""
    idle = {"validate_every", "max_validation_batches", "validation_whole_batches"}
    idle |= {"snapshot_best", "durable_every"}
    return {name: value for name, value in given.items() if name not in idle}


PARTS: Mapping[str, Part] = MappingProxyType(
    {
        part.name: part
        for part in (
            Part(name="main", shows="learning: 3,000 steps from scratch", seconds=420, make=main),
            Part(name="package", shows="export, transformers, samples", seconds=80, make=package),
            Part(name="resident", shows="control: all in memory", seconds=420, make=resident),
            Part(name="killed", shows="persistence: three SIGKILLs", seconds=170, make=killed),
            Part(name="control", shows="control: a kill that shows", seconds=75, make=control),
            Part(name="ablations", shows="clipping, guard, fp16", seconds=260, make=ablations),
            Part(name="hot", shows="the guard at a rate too high", seconds=80, make=hot),
            Part(name="brisk", shows="the guard at a rate less high", seconds=80, make=brisk),
            Part(name="v25", shows="the source's 291 M recipe", seconds=420, make=v25),
            Part(name="memory", shows="sizes at 4 to 24 GiB", seconds=230, make=memory),
            Part(name="rows", shows="rows at 8 to 24 GiB alone", seconds=420, make=rows),
            Part(name="deep", shows="a deep model at 4 GiB", seconds=170, make=deep),
            Part(name="rates", shows="the search of the peak rate", seconds=100, make=rates),
            Part(name="search", shows="the search at small scale", seconds=480, make=search),
            Part(name="long", shows="as low as a GPU's time lets it", seconds=560, make=long),
            Part(name="probe", shows="how long slow steps take", seconds=60, make=probe),
        )
    }
)
