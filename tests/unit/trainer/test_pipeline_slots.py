"""Is a slot used behind whatever its memory was used for before?"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trainer.device_lanes import HostLanes, Lane, Mark
from trainer.pipeline.slots import Ring


class Marked:
    """A point in a lane: how much the lane had been asked for."""

    def __init__(self, lane: Lane, asked: int) -> None:
        self.lane, self.asked = lane, asked


class CountedLanes(HostLanes):
    """Lanes that count what each was asked for, and know what each has waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = dict.fromkeys(Lane, 0)
        self.waited: dict[Lane, list[Marked]] = {lane: [] for lane in Lane}

    def mark(self, lane: Lane, *, for_host: bool = False) -> Mark | None:
        return Marked(lane, self.asked[lane])

    def wait(self, lane: Lane, mark: Mark | None) -> None:
        assert isinstance(mark, Marked)
        self.waited[lane].append(mark)

    def is_behind(self, lane: Lane, other: Lane, asked: int) -> bool:
        return any(mark.lane is other and mark.asked >= asked for mark in self.waited[lane])


def ring_of(lanes: CountedLanes, slots: int) -> Ring:
    return Ring(
        lanes,
        name="test",
        slots=slots,
        count=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
        poison=False,
    )


def made_late(lanes: CountedLanes) -> Ring:
    return ring_of(lanes, 1)


def grown_late(lanes: CountedLanes) -> Ring:
    ring = ring_of(lanes, 1)
    ring.take(Lane.UPDATE)
    lanes.asked[Lane.COMPUTE] += 1
    ring.grow(2)
    return ring


@pytest.mark.parametrize("made", [made_late, grown_late])
def test_does_a_lane_wait_for_what_was_computed_before_a_slot_was_made(
    made: Callable[[CountedLanes], Ring],
) -> None:
    """The memory of a new slot may be what the computation has given up and not finished with."""
    lanes = CountedLanes()
    lanes.asked[Lane.COMPUTE] = 3
    ring = made(lanes)
    asked = lanes.asked[Lane.COMPUTE]
    lanes.asked[Lane.COMPUTE] += 5  # what is computed meanwhile has no say
    assert not lanes.is_behind(Lane.ACTIVATIONS_IN, Lane.COMPUTE, asked)
    ring.take(Lane.ACTIVATIONS_IN)
    assert lanes.is_behind(Lane.ACTIVATIONS_IN, Lane.COMPUTE, asked)
    assert not lanes.is_behind(Lane.ACTIVATIONS_IN, Lane.COMPUTE, asked + 1)


def test_does_a_lane_wait_for_the_last_use_of_a_slot() -> None:
    lanes = CountedLanes()
    ring = ring_of(lanes, 1)
    slot = ring.take(Lane.PARAMS_IN)
    lanes.asked[Lane.UPDATE] = 2
    ring.give_back(slot, Lane.UPDATE, lanes.mark(Lane.OUT))
    ring.take(Lane.STATE_IN)
    assert lanes.is_behind(Lane.STATE_IN, Lane.UPDATE, 2)
    assert lanes.is_behind(Lane.STATE_IN, Lane.OUT, 0)
