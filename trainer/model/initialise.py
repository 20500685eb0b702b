"""First values of a stage's parameters, a pure function of (seed, stage name, tensor name).

Knows nothing of stores: it fills tensors that it is given. Invariant: neither the order of stages
nor the number of threads changes a value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.model.stages import Stage


def fill_initial(stage: Stage, seed: int, targets: Mapping[str, Tensor]) -> None:
    """Write the first values of `stage` into `targets`, fp32 tensors of its shapes."""
    deviation = stage.config.initializer_range
    for name, parameter in stage.parameters.items():
        if parameter.initial == "normal":
            targets[name].normal_(0.0, deviation, generator=generator_of(seed, stage.name, name))
        else:
            targets[name].fill_(1.0 if parameter.initial == "ones" else 0.0)


def generator_of(seed: int, stage_name: str, tensor_name: str) -> torch.Generator:
    """Seed by digest: neighbouring seeds or names share no stream."""
    digest = hashlib.sha256(f"{seed}\n{stage_name}\n{tensor_name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
