"""One sweep: every running request passes stage 0, 1, … together with the others.

Owns the order of a sweep over several models at once. Knows nothing of queues or pages. Invariants:
a stage that two models have in common is brought in once; an error in a stage ends the requests of
that model alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from serve.jobs import Job
from serve.kv_cache import PagedCache
from serve.residency import StageShelf
from serve.weights import Role, StagePlace, Weights
from shardb.errors import ShardbError

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one request does in a sweep: `count` tokens of its text, then guesses."""

    job: Job
    count: int
    guesses: Sequence[int]
    logit_rows: int


class Passage(Protocol):
    """The rows of one commit on their way; the head leaves `logits` [rows, V], fp32 on the host."""

    logits: Tensor | None

    @property
    def wants_logits(self) -> bool:
        """Say whether any token's logits are asked for."""

    def run(self, role: Role, layer: int, weights: Weights) -> None:
        """Take the rows through one stage."""


@dataclass(kw_only=True, slots=True)
class ModelGroup:
    """The requests of one commit in a sweep."""

    places: Sequence[StagePlace]
    parts: Sequence[Part]
    passage: Passage
    cache: PagedCache
    error: ShardbError | None = field(default=None)


def run_sweep(groups: Sequence[ModelGroup], shelf: StageShelf) -> None:
    """Take every group to its logits, which its passage then holds, or to its `error`."""
    shelf.begin_sweep(_order(groups), after=[group.places[0] for group in groups])
    for index in range(max(len(group.places) for group in groups)):
        for group in groups:
            if index < len(group.places) and group.error is None:
                _run_stage(group, group.places[index], shelf)


def _order(groups: Sequence[ModelGroup]) -> list[StagePlace]:
    longest = max(len(group.places) for group in groups)
    return [
        group.places[index]
        for index in range(longest)
        for group in groups
        if index < len(group.places)
    ]


def _run_stage(group: ModelGroup, place: StagePlace, shelf: StageShelf) -> None:
    if place.role == "head" and not group.passage.wants_logits:
        return
    try:
        group.passage.run(place.role, place.index - 1, shelf.take(place))
    except ShardbError as error:
        group.error = error
    except Exception as error:
        LOG.warning("computing a stage failed", exc_info=True)
        group.error = ShardbError(
            f"computing {place.shard} of step {place.pinned.commit.step} failed:"
            f" {type(error).__name__}: {error}; if memory ran out, give smaller"
            " --max-resident-bytes or --kv-cache-bytes"
        )
