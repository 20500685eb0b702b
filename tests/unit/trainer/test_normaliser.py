"""The normaliser's formula at its edges."""

from __future__ import annotations

import pytest

from trainer.normaliser import NormaliserSettings, normalisation


def test_shards_of_one_size_are_left_alone() -> None:
    found = normalisation(NormaliserSettings(every=1), {"a": 2.0, "b": 4.0}, {"a": 4, "b": 16})
    assert found.target_rms == 1.0
    assert found.factors == {"a": 1.0, "b": 1.0}


def test_the_factor_is_clamped_then_blended() -> None:
    settings = NormaliserSettings(every=1, blend=0.5, min_scale=0.25, max_scale=3.0)
    found = normalisation(settings, {"small": 0.01, "large": 100.0}, {"small": 4, "large": 4})
    assert found.raw["small"] > 3.0
    assert found.factors["small"] == 2.0
    assert found.factors["large"] == pytest.approx(1.0 + 0.5 * (found.raw["large"] - 1.0))


def test_no_gradient_and_no_blend_change_nothing() -> None:
    found = normalisation(NormaliserSettings(every=1), {"zero": 0.0, "b": 1.0}, {"zero": 4, "b": 4})
    assert found.factors["zero"] == 1.0
    still = normalisation(
        NormaliserSettings(every=1, blend=0.0), {"a": 1.0, "b": 9.0}, {"a": 1, "b": 1}
    )
    assert set(still.factors.values()) == {1.0}


def test_it_is_due_at_multiples_and_never_when_off() -> None:
    assert [step for step in range(1, 8) if NormaliserSettings(every=3).is_due(step)] == [3, 6]
    assert not NormaliserSettings().is_due(4)
