"""What a run with adapters is asked for.

Owns the settings' rules. Knows nothing of models, tensors or stores; reading flags loads no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.errors import InputError

ALL_LINEAR = "all-linear"
QUANTS = ("none", "nf4")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings:
    """Adapters of one rank beside every weight whose module has one of the names in `targets`.

    What an adapter adds to a module's output is alpha / rank times B(A x); while it is trained,
    elements of x are dropped with probability `dropout`.

    Raises:
        InputError: a value is outside its range; the message names the flag.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    base_quant: str = "none"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InputError(f"--lora-rank is {self.rank}: give 1 or more")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise InputError(f"--lora-alpha is {self.alpha}: give a finite number above 0")
        if not 0 <= self.dropout < 1:
            raise InputError(f"--lora-dropout is {self.dropout}: give at least 0 and less than 1")
        if not self.targets or not all(self.targets):
            raise InputError("--lora-targets is empty: give names such as q_proj,v_proj")

    @property
    def scale(self) -> float:
        """Give the factor of what an adapter adds."""
        return self.alpha / self.rank

    def is_target(self, module: str) -> bool:
        """Say whether the module `self_attn.q_proj` gets an adapter."""
        if ALL_LINEAR in self.targets:
            return True
        return any(is_called(module, name) for name in self.targets)


def is_called(module: str, name: str) -> bool:
    """Say whether a target names the module: `self_attn.q_proj` by itself, or by its end."""
    return module == name or module.endswith("." + name)
