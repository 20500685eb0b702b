"""What layers are handed beside the hidden states, as memory sees it.

Owns that size. Knows nothing of steps; loads transformers only for models whose layers it computes.
"""

from __future__ import annotations

import torch

from trainer.model.config import ModelConfig


def handed_bytes(config: ModelConfig, rows: int, positions: int, dtype: torch.dtype) -> int:
    """Give the bytes of masks and angles that are kept for inputs [rows, positions]."""
    if not config.hf_config:
        return 0
    from trainer.model.hf_family import hf_model

    return hf_model(config.hf_config).handed_bytes(
        torch.empty(rows, positions, config.hidden_size, dtype=dtype, device="meta")
    )
