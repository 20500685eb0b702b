"""The length at which a family changes its rotary positions, if it does.

Owns the one rule: with `longrope` scaling, texts longer than the original window turn by other
angles, from their first token on. Knows nothing of requests.
"""

from __future__ import annotations

import json
from functools import lru_cache

from trainer.model.config import ModelConfig


def turn_length(config: ModelConfig) -> int | None:
    """Give the longest text that is computed by the first of two kinds of angles."""
    return _turn_length(config.hf_config) if config.hf_config else None


@lru_cache(maxsize=16)
def _turn_length(hf_config: str) -> int | None:
    values = json.loads(hf_config)
    scaling = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if scaling.get("rope_type", scaling.get("type")) != "longrope":
        return None
    found = (
        scaling.get("original_max_position_embeddings")
        or values.get("original_max_position_embeddings")
        or values["max_position_embeddings"]
    )
    return int(found)
