"""The loss scale stays a power of two within its bounds."""

from __future__ import annotations

import pytest

from trainer.scaler import LARGEST, LossScaler


def test_it_grows_after_enough_good_steps_and_halves_at_once() -> None:
    scaler = LossScaler(scale=4.0)
    for good in (1, 2):
        scaler = scaler.after_success(3)
        assert (scaler.scale, scaler.good_steps) == (4.0, good)
    scaler = scaler.after_success(3)
    assert (scaler.scale, scaler.good_steps) == (8.0, 0)
    assert scaler.after_success(3).after_overflow() == LossScaler(scale=4.0)


def test_it_stays_in_its_bounds() -> None:
    assert LossScaler(scale=1.0).after_overflow().scale == 1.0
    assert LossScaler(scale=LARGEST).after_success(1).scale == LARGEST


def test_it_reads_back_as_it_was_written() -> None:
    scaler = LossScaler(scale=1024.0, good_steps=7)
    assert LossScaler.from_json(scaler.to_json()) == scaler


@pytest.mark.parametrize("scale", [0.5, 3.0, 2.0**25])
def test_another_scale_is_refused(scale: float) -> None:
    with pytest.raises(AssertionError):
        LossScaler(scale=scale)
