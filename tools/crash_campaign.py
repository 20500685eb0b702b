"""The campaign behind `make crash`: which workloads are explored, how far each, and the sum of it.

Owns the plan (the written workloads, and every sequence of one to three verbs), the share of the
wanted states that each gets, and the file from which an interrupted campaign goes on. Knows nothing
of terminals.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from shardb.testing.bases import Base
from shardb.testing.explorer import ExploreLimits, OnPoint, explore, explore_recorded
from shardb.testing.images import ImageLimits
from shardb.testing.verbs import VERBS, Verb, recorded, small_base
from shardb.testing.workloads import WORKLOADS
from tools.crash_training import TRAIN, train_step, training_base

ALL_VERBS: Mapping[str, Verb] = {**VERBS, TRAIN: train_step}
# Of the states that are left when the sequences of two verbs begin, the part that they get.
PAIRS_SHARE = 0.4
QUICK = ExploreLimits(
    images=ImageLimits(
        exhaustive_operations=3, random_subsets=3, single_operations=4, torn_writes=4
    ),
    recovery_every=1_000,
    kill_every=8,
    go_on_every=16,
    audit_every=4,
)
# Single verbs: every image that is named, every index, subsets exhaustive up to ten operations.
SINGLE = ExploreLimits(
    images=ImageLimits(exhaustive_operations=10, point_images=60),
    indexes="every",
    earlier_indexes=99,
    recovery_every=250,
    kill_every=4,
    go_on_every=16,
)
PAIR = ExploreLimits(
    images=ImageLimits(exhaustive_operations=10),
    earlier_indexes=99,
    recovery_every=150,
    go_on_every=16,
)
TRIPLE = replace(PAIR, indexes="one", kill_every=10_000, recovery_every=40)
Indexes = Literal["one", "two", "every"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One workload: written by hand, or a sequence of verbs."""

    name: str
    verbs: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        """Under what its counts are summed up."""
        count = len(self.verbs)
        return {0: "written by hand", 1: "one verb", 2: "two verbs", 3: "three verbs"}[count]


@dataclass(kw_only=True)
class Sums:
    """Counts of many tasks together."""

    tasks: int = 0
    operations: int = 0
    states: int = 0
    recoveries_crashed: int = 0
    processes_killed: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    indexes: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def add(self, result: Mapping[str, Any]) -> None:
        """Take in the result of a task."""
        self.tasks += 1
        self.operations += result["operations"]
        self.states += result["states"] + result["recovery_states"]
        self.recoveries_crashed += result["recoveries_crashed"]
        self.processes_killed += result["processes_killed"]
        self.seconds += result["seconds"]
        self.faults.update(result["faults"])
        self.indexes.update(result["indexes"])
        self.violations += [f"{text}\n  again: {result['again']}" for text in result["violations"]]


def plan(seed: int) -> list[Task]:
    """Every task: what is written by hand, then sequences by length, triples in a drawn order."""
    tasks = [Task(name=name) for name in sorted(WORKLOADS)]
    for length in (1, 2, 3):
        sequences = list(itertools.product(sorted(ALL_VERBS), repeat=length))
        if length == 3:
            random.Random(seed).shuffle(sequences)
        tasks += [Task(name=",".join(verbs), verbs=verbs) for verbs in sequences]
    return tasks


class Explorer:
    """Explores one task after the other in a scratch directory."""

    def __init__(self, scratch: str, seed: int) -> None:
        self.scratch = scratch
        self.seed = seed
        self._bases: dict[bool, Base] = {}

    def base(self, verbs: Sequence[str]) -> Base:
        """The store that a sequence begins with: a tiny run's where the trainer takes part."""
        trains = TRAIN in verbs
        if trains not in self._bases:
            root = os.path.join(self.scratch, "base")
            os.mkdir(root)
            self._bases[trains] = (training_base if trains else small_base)(root)
            os.rename(root, f"{root}-{trains}")
        return self._bases[trains]

    def explore(
        self, task: Task, budget: int, on_point: OnPoint | None = None, **fixed: Any
    ) -> dict[str, Any]:
        """Explore a task in about `budget` states; what came out, as JSON has it."""
        start = time.monotonic()
        again = f"python -m tools.crash --workload {task.name}"
        place = os.path.join(self.scratch, "task")
        os.mkdir(place)
        if not task.verbs:
            counts = explore(
                WORKLOADS[task.name],
                scratch=place,
                limits=QUICK,
                seed=self.seed,
                on_point=on_point,
            )
            again += " --effort quick"
        else:
            with recorded(self.base(task.verbs), task.verbs, place, ALL_VERBS) as ready:
                limits = limits_of(task, budget, ready.points)
                if fixed:
                    limits = with_fixed(limits, **fixed)
                counts = explore_recorded(
                    ready, scratch=place, limits=limits, seed=self.seed, on_point=on_point
                )
            again = f"python -m tools.crash --sequence {task.name} --seed {self.seed}"
            again += f" --images {limits.images.point_images} --indexes {limits.indexes}"
        _remove(place)
        return {
            **counts.to_json(),
            "task": task.name,
            "group": task.group,
            "again": again,
            "seconds": round(time.monotonic() - start, 2),
        }


def limits_of(task: Task, budget: int, points: int) -> ExploreLimits:
    """How far to explore a sequence, so that it comes to about `budget` states."""
    length = len(task.verbs)
    if length == 1:
        return SINGLE
    per_point = budget / max(1, points)
    if length == 2:
        images = replace(PAIR.images, point_images=max(1, round(per_point / 2)))
        recovery = replace(PAIR.recovery_images, point_images=2)
        return replace(PAIR, images=images, recovery_images=recovery)
    images = replace(TRIPLE.images, point_images=max(1, round(per_point)))
    recovery = replace(TRIPLE.recovery_images, point_images=1)
    return replace(TRIPLE, images=images, recovery_images=recovery)


def with_fixed(
    limits: ExploreLimits, *, images: int | None, indexes: Indexes | None
) -> ExploreLimits:
    """The limits with what a replay has fixed."""
    if images is not None:
        limits = replace(limits, images=replace(limits.images, point_images=images))
    return replace(limits, indexes=indexes) if indexes is not None else limits


class Campaign:
    """All tasks of a plan, each once; results are kept in a file, one line each."""

    def __init__(self, path: Path, *, seed: int, states: int) -> None:
        """Go on with the campaign of `path`, if it is the same one; else begin it anew."""
        self.results: dict[str, dict[str, Any]] = {}
        self.states_wanted = states
        self.tasks = plan(seed)
        self._path = path
        head = {"seed": seed, "states": states, "verbs": sorted(ALL_VERBS)}
        if path.exists():
            lines = path.read_text().splitlines()
            if lines and json.loads(lines[0]) == head:
                found = [json.loads(line) for line in lines[1:] if line.endswith("}")]
                self.results = {result["task"]: result for result in found}
                return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(head) + "\n")

    @property
    def states(self) -> int:
        """Distinct states explored so far."""
        return sum(r["states"] + r["recovery_states"] for r in self.results.values())

    def run(
        self, explorer: Explorer, on_result: Callable[[dict[str, Any]], None]
    ) -> Iterator[Task]:
        """Do what is left; gives each task before it is explored."""
        for task in self.tasks:
            if task.name in self.results:
                continue
            yield task
            result = explorer.explore(task, self.budget(task))
            self.results[task.name] = result
            with self._path.open("a") as file:
                file.write(json.dumps(result) + "\n")
            on_result(result)

    def budget(self, task: Task) -> int:
        """The share of a task in the states that are still wanted."""
        left = [t for t in self.tasks if t.name not in self.results]
        alike = sum(1 for t in left if len(t.verbs) == len(task.verbs))
        wanted = max(0, self.states_wanted - self.states)
        done = [r for r in self.results.values() if r["group"] == "two verbs"]
        if len(task.verbs) == 2:
            pairs = sum(r["states"] + r["recovery_states"] for r in done)
            wanted = max(0, round(PAIRS_SHARE * (wanted + pairs)) - pairs)
        return wanted // max(1, alike)

    def sums(self) -> dict[str, Sums]:
        """The sums by group, and of all."""
        groups = {"all": Sums()}
        for result in self.results.values():
            for group in (result["group"], "all"):
                groups.setdefault(group, Sums()).add(result)
        return groups


def _remove(path: str) -> None:
    """Remove an empty directory: an exploration leaves none of its own files."""
    os.rmdir(path)
