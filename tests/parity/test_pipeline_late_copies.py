"""Does the pipeline give the same bits when every copy is made as late as it may be?

The host's lanes make each copy at once, so a wait that is missing shows nothing there. Here the
same steps run in lanes whose copies wait until somebody waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.parity.test_pipeline_equals_resident import BITES_SOMETIMES, Pipelined
from tests.parity.test_streamed_equals_resident import options_of
from tests.support.late_lanes import LateLanes, LateSealer
from tests.support.tiny_model import TINY, TINY_TIED
from trainer.device import Device
from trainer.device_lanes import Lane
from trainer.engine import StepResult
from trainer.errors import NonFiniteError
from trainer.model.config import ModelConfig
from trainer.pipeline.course import PipelineCourse

STEPS = 5
DEEP = replace(TINY, num_layers=4)
# Stages that stay: what they write waits for the next step's forward pass.
RESIDENTS = ("embeddings", "block_000", "block_002")


class Late(Pipelined):
    """The pipeline with late copies; some stages stay from the third step on."""

    def __init__(self, lanes: LateLanes, sealer: LateSealer, *given: Any, **settings: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.parity.test_streamed_equals_resident.STEPS", STEPS)
            patch.setattr("trainer.pipeline.pipeline.lanes_of", lambda *_: lanes)
            patch.setattr("trainer.pipeline.pipeline.Sealer", lambda *_, **__: sealer)
            patch.setattr(Device, "wait", lambda _: lanes.finish())
            self.plain: list[str] = []
            super().__init__(*given, **settings)
            self.found = self.differences() + self.plain

    def check_counts(self, streamed: StepResult) -> None:
        """What comes out not finite is done again the plain way, which is a difference here."""
        if not self.engine.pipeline_steps:
            self.plain.append("a step went the plain way")

    def train(self, step: int, rate: float) -> Any:
        result = super().train(step, rate)
        if step == 2:
            assert self.engine.pipeline is not None
            self.engine.pipeline.keep_resident(RESIDENTS)
            # Where hidden states are on the host, more of them are asked for ahead.
            self.engine.pipeline.boundaries.grow(7)
        return result


def late(
    config: ModelConfig,
    clip: str,
    accumulation: int,
    *,
    deaf: Sequence[Lane] = (),
    unsealed: Sequence[Lane] = (),
    **settings: Any,
) -> list[str]:
    options = options_of("bf16", clip)
    if clip == "global":
        options = replace(options, max_grad_norm=BITES_SOMETIMES[accumulation])
    lanes = LateLanes(deaf)
    sealer = LateSealer(lanes, deaf=unsealed)
    return Late(lanes, sealer, config, options, accumulation, **settings).found


@pytest.mark.parametrize(
    ("config", "clip", "accumulation", "settings"),
    [
        (DEEP, "global", 1, {"gradients": "recompute"}),
        (DEEP, "global", 3, {"gradients": "host"}),
        (TINY_TIED, "shard", 3, {"activations_on_host": True}),
        (DEEP, "none", 1, {}),
    ],
)
def test_late_copies_change_nothing(
    config: ModelConfig, clip: str, accumulation: int, settings: dict[str, Any]
) -> None:
    assert late(config, clip, accumulation, **settings) == []


@pytest.mark.parametrize("lane", [Lane.COMPUTE, Lane.UPDATE, Lane.PARAMS_IN, Lane.STATE_IN])
def test_control_a_lane_that_waits_for_nobody_is_noticed(lane: Lane) -> None:
    try:
        found = late(DEEP, "none", 1, deaf=[lane], activations_on_host=True)
    except NonFiniteError:
        return
    assert found != []


def test_control_a_commit_that_does_not_wait_for_what_was_held_is_noticed() -> None:
    assert late(TINY, "none", 1, unsealed=[Lane.OUT_LATER]) != []


def test_is_the_next_forward_pass_asked_for_before_what_was_held_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    begin_next: Any = PipelineCourse._begin_next

    def noted(course: PipelineCourse, *given: Any) -> None:
        asked.append("forward")
        begin_next(course, *given)

    class Noting(LateLanes):
        def wait(self, lane: Lane, mark: Any) -> None:
            if lane is Lane.OUT_LATER:
                asked.append("held")
            super().wait(lane, mark)

    monkeypatch.setattr(PipelineCourse, "_begin_next", noted)
    lanes = Noting()
    assert Late(lanes, LateSealer(lanes), TINY, options_of("bf16", "none"), 1).found == []
    first_held = asked.index("held")
    assert asked[first_held - 1] == "forward"
