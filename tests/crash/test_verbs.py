"""Any verb after any other one, and a crash at any operation: is the store one it may have been?

Walks that have every pair of verbs once; `make crash` has every sequence of up to three.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from shardb import gc
from shardb.testing import verbs
from shardb.testing.counts import Counts
from shardb.testing.explorer import ExploreLimits, explore_recorded
from shardb.testing.images import ImageLimits
from shardb.testing.operations import Kind, Operation
from shardb.testing.recording import Ignore, ignore_nothing
from shardb.testing.verbs import VERBS, Verb, recorded, small_base
from tools.crash_training import TRAIN, train_step, training_base

WALK_VERBS = 11
# Images of two operations are the fewest that a verb gets; most have many more.
STATES_OF_A_VERB_MIN = 3
LIMITS = ExploreLimits(
    images=ImageLimits(point_images=1),
    recovery_images=ImageLimits(point_images=1),
    indexes="one",
    earlier_indexes=4,
    recovery_every=120,
    kill_every=30,
    audit_every=2,
    violations=5,
)


def pair_walk(names: Sequence[str]) -> list[str]:
    """A shortest walk in which each verb follows each verb, itself included, once."""
    left = {name: list(names) for name in names}
    walk, stack = [], [names[0]]
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            walk.append(stack.pop())
    return walk[::-1]


def with_training() -> list[str]:
    """The trainer's step after, and before, each verb."""
    return [TRAIN, *(verb for other in sorted(VERBS) for verb in (TRAIN, other)), TRAIN]


def pieces(walk: Sequence[str], length: int) -> list[list[str]]:
    """Cut a walk so that each piece begins with the verb the one before has ended with."""
    count = (len(walk) - 1) // (length - 1)
    cuts = [number * (length - 1) for number in range(count)]
    return [list(walk[at : at + length]) for at in cuts[:-1]] + [list(walk[cuts[-1] :])]


def explored(
    sequence: Sequence[str],
    scratch: str,
    limits: ExploreLimits = LIMITS,
    *,
    ignore: Ignore = ignore_nothing,
) -> Counts:
    """Explore the crashes of a whole walk."""
    known: Mapping[str, Verb] = {**VERBS, TRAIN: train_step}
    root = os.path.join(scratch, "base")
    os.mkdir(root)
    base = (training_base if TRAIN in sequence else small_base)(root)
    with recorded(base, sequence, scratch, known, ignore=ignore, whole=True) as ready:
        return explore_recorded(ready, scratch=scratch, limits=limits, seed=len(sequence))


WALKS = [*pieces(pair_walk(sorted(VERBS)), WALK_VERBS), *pieces(with_training(), WALK_VERBS)]


def test_do_the_walks_have_every_pair_of_verbs() -> None:
    pairs = [pair for walk in WALKS for pair in itertools.pairwise(walk)]
    every = {(one, other) for one in (*VERBS, TRAIN) for other in (*VERBS, TRAIN)}
    assert set(pairs) == every
    assert len(pairs) == len(every)


@pytest.mark.slow
@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: f"{walk[0]} to {walk[-1]}")
def test_may_any_verb_follow_any_other_and_be_cut_short(walk: list[str], scratch: str) -> None:
    counts = explored(walk, scratch)
    print(counts)
    assert counts.states > len(walk) * STATES_OF_A_VERB_MIN
    assert not counts.violations, "\n".join(map(str, counts.violations))


# Control arms: planted faults of verbs that nothing but these walks takes to a crash.


def _syncs_of(part: str) -> Ignore:
    def ignore(operation: Operation) -> bool:
        return operation.kind is Kind.SYNC and part in operation.path

    return ignore


FIRST = replace(LIMITS, images=ImageLimits(point_images=12), kill_every=10_000, violations=1)


@pytest.mark.parametrize(
    ("verb", "part"),
    [
        ("pack", "staged.@pack"),
        ("publish", "staged.main"),
        ("repair", ".wal"),
        ("repair", "spare/"),
    ],
)
def test_would_a_lying_sync_be_noticed(verb: str, part: str, scratch: str) -> None:
    assert explored([verb], scratch, FIRST, ignore=_syncs_of(part)).violations


def test_would_a_collection_that_takes_too_much_be_noticed(
    scratch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a snapshot needs is taken for garbage."""
    needed = gc._Collection._needed_objects

    def fewer(self: gc._Collection) -> tuple[set[str], set[str]]:
        digests, packed = needed(self)
        return {digest for digest in digests if digest != min(digests)}, packed

    monkeypatch.setattr(gc._Collection, "_needed_objects", fewer)
    assert explored(["gc"], scratch, FIRST).violations


def test_would_a_repair_that_gives_up_what_a_copy_has_be_noticed(
    scratch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is cut at the damage, though the copy has all of it."""
    monkeypatch.setattr(verbs, "StoreFiles", lambda *_: None)
    assert explored(["repair"], scratch, FIRST).violations
