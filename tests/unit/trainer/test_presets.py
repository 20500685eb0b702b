"""The presets have exactly the parameters and shards that their names stand for."""

from __future__ import annotations

import pytest

from trainer.errors import InputError
from trainer.model.presets import PRESETS, preset
from trainer.model.stages import build_stages, parameter_count

COUNTS = {
    "perkunas-v2.0": (291_351_424, 27),
    "perkunas-v2.1": (373_867_520, 27),
    "perkunas-v2.5": (291_351_424, 27),
    "perkunas-v2.6-50m": (49_840_448, 12),
    "perkunas-v2.8-50m": (55_963_520, 12),
    "perkunas-v2.9-100m": (100_487_424, 16),
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_and_shard_count(name: str) -> None:
    config = PRESETS[name]
    assert (parameter_count(config), len(build_stages(config))) == COUNTS[name]


def test_every_preset_is_pinned_but_the_demo() -> None:
    assert set(PRESETS) - set(COUNTS) == {"demo"}


def test_demo_is_small() -> None:
    assert PRESETS["demo"].vocab_size == 2000
    assert parameter_count(PRESETS["demo"]) < 5_000_000


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"perkunas-v2\.0"):
        preset("perkunas-v3")
