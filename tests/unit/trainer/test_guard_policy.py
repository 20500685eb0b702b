"""Which steps the guard accepts, and what it tries next."""

from __future__ import annotations

import math

import pytest

from trainer.guard_policy import GuardPolicy

POLICY = GuardPolicy(
    attempts_max=4,
    tolerance=0.02,
    tolerance_ratio=0.01,
    learning_rate_scales=(1.0, 0.5),
    grad_norm_scales=(1.0, 0.75, 0.5),
    on_exhaust="skip",
)


@pytest.mark.parametrize(
    ("before", "after", "accepted"),
    [
        (1.0, 0.5, True),
        (1.0, 1.02, True),
        (1.0, 1.021, False),
        (8.0, 8.08, True),
        (8.0, 8.081, False),
        (1.0, math.nan, False),
        (1.0, math.inf, False),
    ],
)
def test_the_larger_tolerance_holds(before: float, after: float, accepted: bool) -> None:
    assert POLICY.accepts(before, after) is accepted


def test_the_last_of_a_list_holds_for_the_rest() -> None:
    scales = [POLICY.scales(attempt) for attempt in range(4)]
    assert scales == [(1.0, 1.0), (0.5, 0.75), (0.5, 0.5), (0.5, 0.5)]
