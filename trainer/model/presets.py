"""Named model geometries.

Owns the names and their sizes. The parameter count of each is pinned by a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from trainer.errors import InputError
from trainer.model.config import ModelConfig


def _geometry(
    vocab_size: int, hidden_size: int, num_layers: int, num_heads: int, intermediate_size: int
) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        intermediate_size=intermediate_size,
    )


PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "demo": _geometry(2000, 192, 4, 6, 512),
        "perkunas-v2.0": _geometry(32000, 896, 24, 14, 2432),
        "perkunas-v2.1": _geometry(32000, 1024, 24, 16, 2816),
        "perkunas-v2.5": _geometry(32000, 896, 24, 14, 2432),
        "perkunas-v2.6-50m": _geometry(32000, 448, 9, 7, 1152),
        "perkunas-v2.8-50m": _geometry(8000, 640, 9, 10, 1792),
        "perkunas-v2.9-100m": _geometry(8000, 768, 13, 12, 1920),
    }
)


def preset(name: str) -> ModelConfig:
    """Give the geometry called `name`; an unknown name raises InputError with the known ones."""
    if name not in PRESETS:
        raise InputError(
            f"--preset {name}: no preset has this name: choose {', '.join(sorted(PRESETS))}"
        )
    return PRESETS[name]
