"""How fast adapters will be trained, foretold as a bracket from measured rates.

Owns the operations of a token beside a frozen base, and the bracket. Knows nothing of how rates are
measured. It is a forecast, not a promise: the upper end is what large matrix products and copies
would allow if nothing else took time and they ran beside one another; the lower end has products at
half that rate, and copies after them. Reading from a disk is not in it.

Formula: each matrix of a block is multiplied with three times a token, forward, again, and back to
its input, 2 operations a weight each, one that is only added to the output twice; the head twice;
no gradient of a weight is taken. Attention as in `trainer.ceiling`, and once more for the second
forward pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.ceiling import Ceiling
from trainer.lora.targets import adapter_parameters, linear_modules
from trainer.model.adapter_settings import LoraSettings
from trainer.model.stages import build_trunk
from trainer.recipe import Recipe

HALF = 0.5
# The base is brought in once each way.
VISITS = 2
# Forward, again, back to the input; for an adapter also back to itself, each 2 a number.
BLOCK_OPERATIONS, ADAPTER_OPERATIONS, HEAD_OPERATIONS, ATTENTION_OPERATIONS = 6, 8, 4, 16
SPARED_OPERATIONS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Bracket:
    """Tokens a second between `least` and `most`."""

    least: float
    most: float

    @property
    def text(self) -> str:
        """Say it for people."""
        return (
            f"{_rounded(self.least)} to {_rounded(self.most)} tokens/s forecast from matrix"
            " products and copies measured on this machine: no promise"
        )

    def to_json(self) -> dict[str, float]:
        """Give both ends."""
        return {"tokens_per_second_least": self.least, "tokens_per_second_most": self.most}


def token_operations(recipe: Recipe, lora: LoraSettings) -> float:
    """Give the operations that a token needs."""
    model = recipe.model
    trunk = build_trunk(model)
    multiplied = sum(
        math.prod(shape) for stage in trunk for shape in linear_modules(stage).values()
    )
    spared = sum(
        math.prod(stage.parameters[stage.added_last].shape)
        for stage in trunk
        if stage.added_last is not None
    )
    added = sum(
        math.prod(parameter.shape)
        for stage in trunk
        for parameter in adapter_parameters(stage, lora).values()
    )
    attention = model.num_layers * model.num_heads * model.head_dim * recipe.seq_len
    return float(
        BLOCK_OPERATIONS * multiplied
        - SPARED_OPERATIONS * spared
        + ADAPTER_OPERATIONS * added
        + HEAD_OPERATIONS * model.vocab_size * model.hidden_size
        + ATTENTION_OPERATIONS * attention
    )


def bracket(recipe: Recipe, lora: LoraSettings, base_bytes: int, ceiling: Ceiling) -> Bracket:
    """Give the bracket; base_bytes: of the frozen base as it is copied."""
    tokens = recipe.rows_per_step * recipe.seq_len
    computing = token_operations(recipe, lora) * tokens / ceiling.matmul_flops_per_second
    copying = VISITS * base_bytes / ceiling.copy_bytes_per_second
    return Bracket(
        least=tokens / (computing / HALF + copying), most=tokens / max(computing, copying)
    )


def _rounded(value: float) -> str:
    """Give three digits of a number, written out."""
    return f"{float(f'{value:.3g}'):,.6g}" if value < 100 else f"{int(float(f'{value:.3g}')):,}"
