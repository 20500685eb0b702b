"""Is the learning rate a pure function of tokens, with the stated shape?"""

from __future__ import annotations

import math

import pytest

from trainer.schedule import Schedule


def schedule(shape: str = "cosine", **changes: float) -> Schedule:
    values = {"peak": 1.0, "warmup_tokens": 100, "decay_tokens": 1000, "min_lr_ratio": 0.1}
    return Schedule(shape=shape, **{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", ["constant", "tokens", "linear", "cosine"])
def test_warm_up_is_linear_and_its_first_step_is_not_wasted(shape: str) -> None:
    rate = schedule(shape).learning_rate
    assert rate(1) == pytest.approx(0.01)
    assert rate(50) == pytest.approx(0.5)
    assert rate(100) == pytest.approx(1.0)


@pytest.mark.parametrize("shape", ["tokens", "linear"])
def test_linear_falls_in_a_straight_line_to_its_floor(shape: str) -> None:
    rate = schedule(shape).learning_rate
    assert rate(600) == pytest.approx(0.55)
    assert rate(1100) == pytest.approx(0.1)
    assert rate(10**9) == pytest.approx(0.1)


def test_cosine_is_half_way_in_the_middle_and_flat_at_the_ends() -> None:
    rate = schedule("cosine").learning_rate
    assert rate(600) == pytest.approx(0.55)
    assert rate(101) == pytest.approx(1.0, abs=1e-4)
    assert rate(1100) == pytest.approx(0.1)
    assert rate(350) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))


def test_constant_and_a_decay_of_zero_tokens_stay_at_the_peak() -> None:
    assert schedule("constant").learning_rate(10**12) == 1.0
    assert schedule("tokens", decay_tokens=0).learning_rate(10**12) == 1.0
    assert schedule("tokens", warmup_tokens=0).learning_rate(1) == pytest.approx(1.0, abs=1e-3)


def test_a_ratio_of_one_keeps_the_peak_through_the_decay() -> None:
    rate = schedule("tokens", min_lr_ratio=1.0, warmup_tokens=0).learning_rate
    assert [rate(tokens) for tokens in (1, 500, 5000)] == [1.0, 1.0, 1.0]
