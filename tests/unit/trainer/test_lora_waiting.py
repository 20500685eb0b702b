"""Does what the first pass leaves in host memory come back as it was, however late copies are?

Copies wait here until somebody waits for them, and what went out is overwritten as soon as it may
be: a wait that is missing shows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.support.late_lanes import LateLanes
from trainer.device import Device
from trainer.device_lanes import Lane
from trainer.lora.waiting import GOING, Key, OnHost
from trainer.lora.waiting_walk import WalkedWaiting
from trainer.vram_trace import META, MemoryTrace

STAGES, BATCHES = 4, 3
ORDER = [(stage, batch) for stage in reversed(range(STAGES)) for batch in range(BATCHES)]


def visit(key: Key, size: int) -> list[Tensor]:
    """Give what a visit leaves: laid out by head, in fp32, nothing at all, and the last stage one.

    Values say where they belong.
    """
    stage, batch = key
    first = torch.full((2, size, 6), float(10 * stage + batch)).to(torch.bfloat16)
    if stage == STAGES - 1:
        return [first]
    heads = torch.arange(2 * size * 6).view(2, size, 2, 3).transpose(1, 2) + float(stage)
    return [first, heads, torch.full((2, 2, size), 0.5 + batch), torch.empty(0)]


def differing(waiting: OnHost, lanes: LateLanes, size: int) -> list[Key]:
    """Leave and take everything; give the visits that came back otherwise."""
    going: list[Sequence[Tensor]] = []
    for stage in range(STAGES):
        for batch in range(BATCHES):
            pieces = visit((stage, batch), size)
            waiting.keep(stage, batch, pieces)
            going.append(pieces)
            for each in going[-1 - GOING] if len(going) > GOING else ():
                each.fill_(-1.0)  # its memory may be used again
    waiting.begin_replay(ORDER)
    for each in going[-1]:
        each.fill_(-1.0)
    found = []
    for key in ORDER:
        taken, expected = waiting.take(*key), visit(key, size)
        assert [each.stride() for each in taken] == [each.stride() for each in expected]
        if not all(torch.equal(a, b) for a, b in zip(taken, expected, strict=True)):
            found.append(key)
        waiting.done()
        assert all(bool(each.isnan().all()) for each in taken), "a slot that was given back is NaN"
    lanes.finish()
    return found


def waiting_of(lanes: LateLanes) -> OnHost:
    return OnHost(lanes, Device.from_name("cpu"), slots=2, poison=True)


def test_it_comes_back_as_it_was_in_every_step() -> None:
    lanes = LateLanes()
    waiting = waiting_of(lanes)
    for size in (5, 5, 8):  # the length of rows may change
        waiting.reset()
        assert differing(waiting, lanes, size) == []


def test_a_step_that_did_not_come_to_its_end_is_forgotten() -> None:
    lanes = LateLanes()
    waiting = waiting_of(lanes)
    for stage, batch in ORDER:
        waiting.keep(stage, batch, visit((stage, batch), 5))
    waiting.begin_replay(ORDER)
    waiting.take(*ORDER[0])
    waiting.reset()
    assert differing(waiting, lanes, 5) == []


def test_control_a_lane_that_waits_for_nobody_is_noticed() -> None:
    lanes = LateLanes([Lane.COMPUTE])
    assert differing(waiting_of(lanes), lanes, 5) != []


def test_the_walk_holds_two_slots_while_something_comes_back_and_one_visit_that_goes_out() -> None:
    trace = MemoryTrace(block_bytes=lambda size: size)
    walked = WalkedWaiting(trace)
    with trace:
        for stage in range(STAGES):
            pieces = [torch.empty(4096, dtype=torch.uint8, device=META) for _ in range(2)]
            walked.keep(stage, 0, pieces)
            del pieces
            assert trace.live_bytes == GOING * 2 * 4096
        walked.begin_replay([])
        for stage in reversed(range(STAGES)):
            assert trace.live_bytes == 2 * 2 * 4096
            assert [each.nbytes for each in walked.take(stage, 0)] == [4096, 4096]
            walked.done()
        assert trace.live_bytes == 0
