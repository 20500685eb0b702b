"""Are parameters fed in order, and none that are on the device already copied again?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.device_lanes import HostLanes, Lane
from trainer.pipeline.feeding import Brought, Parameters
from trainer.pipeline.slots import Ring

TRUNK = ["embeddings", *(f"block_{n}" for n in range(6)), "norm"]
ORDER = [*TRUNK, "head", *reversed(TRUNK)]
STREAMED = [name for name in ORDER if name != "norm"]


class CountingLanes(HostLanes):
    """Lanes that note what is copied in."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[str] = []

    @contextmanager
    def on(self, lane: Lane, name: str = "") -> Iterator[None]:
        if lane is Lane.PARAMS_IN and name:
            self.copied.append(name.removeprefix("parameters "))
        with super().on(lane, name):
            yield


class Base:
    """Every stage's elements are its number and the step's."""

    def __init__(self, step: int) -> None:
        self.step = step

    def elements(self, shard: str) -> Tensor:
        name = shard.partition("/")[2]
        return torch.full((4,), 100.0 * self.step + ORDER.index(name))

    def written(self, _shard: str) -> None:
        return None


class Feeds:
    """Feeds of steps that share slots, with the norm resident."""

    def __init__(self, slots: int) -> None:
        self.lanes = CountingLanes()
        self.ring = Ring(
            self.lanes,
            name="parameters",
            slots=slots,
            count=4,
            dtype=torch.float32,
            device=torch.device("cpu"),
            poison=True,
        )

    def feed(self, step: int, begins_with: list[Brought] | None = None) -> Parameters:
        base: Any = Base(step)
        resident: Any = type("Resident", (), {"params": torch.zeros(4)})()
        return Parameters(
            self.lanes, base, self.ring, {"norm": resident}, ORDER, None, begins_with or []
        )

    def take_step(self, feed: Parameters, step: int) -> None:
        """Go through a step; each stage is updated to its values of the next one."""
        for index, name in enumerate(ORDER):
            brought = feed.next(name)
            if name != "norm":
                assert brought.buffer[0] == 100.0 * step + ORDER.index(name), name
            if index < len(TRUNK):
                feed.give_back(brought, Lane.COMPUTE)
            else:
                brought.buffer.add_(100.0)
                feed.give_back_updated(brought)


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_is_every_stage_fed_in_order_and_few_of_them_twice(slots: int) -> None:
    feeds = Feeds(slots)
    feed = feeds.feed(0)
    feeds.take_step(feed, 0)
    again = min(slots, 6) - 1  # around the head, which has a slot itself
    assert feeds.lanes.copied == STREAMED[: 8 + 0] + STREAMED[8 + again :]
    feeds.lanes.copied.clear()
    left = feed.left_over()
    assert [brought.name for brought in left] == list(reversed(TRUNK[: slots - 1]))
    feeds.take_step(feeds.feed(1, left), 1)
    assert feeds.lanes.copied == STREAMED[slots - 1 : 8] + STREAMED[8 + again :]


def test_does_an_end_give_every_slot_back() -> None:
    feeds = Feeds(3)
    feed = feeds.feed(0)
    feeds.take_step(feed, 0)
    feed.end()
    feeds.take_step(feeds.feed(1), 1)
    assert len(feeds.ring) == 3


def test_control_a_slot_that_is_kept_from_everybody_is_noticed() -> None:
    feeds = Feeds(3)
    feeds.take_step(feeds.feed(0), 0)  # what it left over nobody gives back
    with pytest.raises(IndexError):  # one slot alone would do, but for what stays around the head
        feeds.take_step(feeds.feed(1), 1)
