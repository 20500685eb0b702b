"""Is the stretching of rotary frequencies what its definition says, and is nonsense refused?"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.support.tiny_model import TINY
from trainer.errors import InputError
from trainer.model.layers import rotary_angles, stretched
from trainer.model.rope_scaling import RopeScaling

LLAMA3 = RopeScaling(
    kind="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)


def test_fast_waves_stay_slow_ones_are_divided_and_the_middle_is_between() -> None:
    waves = torch.tensor([100.0, 2047.0, 4000.0, 8193.0, 100_000.0])
    frequencies = 2 * math.pi / waves
    ratio = stretched(frequencies, LLAMA3) / frequencies
    assert torch.equal(ratio[:2], torch.ones(2))
    assert torch.allclose(ratio[3:], torch.full((2,), 1 / 8))
    assert 1 / 8 < float(ratio[2]) < 1


def test_linear_scaling_reads_positions_as_if_they_were_nearer() -> None:
    linear = replace(LLAMA3, kind="linear", factor=2.0)
    device = torch.device("cpu")
    plain, _ = rotary_angles(16, 8, 10000.0, torch.float32, device)
    scaled, _ = rotary_angles(31, 8, 10000.0, torch.float32, device, linear)
    assert torch.allclose(scaled[::2], plain)
    assert not torch.allclose(scaled[:16], plain)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rope_scaling_type": "yarn"}, "rope_scaling_type"),
        ({"rope_scaling_factor": 0.0}, "rope_scaling_factor"),
        ({"rope_scaling_type": "llama3"}, "original_max_position_embeddings"),
        (
            {
                "rope_scaling_type": "llama3",
                "rope_scaling_original_max_position_embeddings": 32,
                "rope_scaling_high_freq_factor": 1.0,
            },
            "high_freq_factor",
        ),
    ],
)
def test_nonsense_is_refused_by_name(fields: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        replace(TINY, **fields)


def test_no_scaling_is_none() -> None:
    assert TINY.rope_scaling is None
    assert replace(TINY, rope_scaling_type="linear").rope_scaling is not None
