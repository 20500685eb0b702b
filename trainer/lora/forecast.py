"""How fast adapters will be trained, foretold as a bracket from measured rates.

Owns the operations of a token beside a frozen base, and the bracket. Knows nothing of how rates are
measured. It is a forecast, not a promise. The upper end is what large matrix products, copies and
asking for operations would allow if nothing else took time: on a device beside one another, and the
last of these at twice its rate; on a host in turn, with half of what values take that pass through
other operations. The lower end has products at half that rate, asking at a third of its rate, all
that passes through other operations, and copies, one behind the other. Reading from a disk and
commits are not in it.

Formula: each matrix of a block is multiplied with three times a token, forward, again, and back to
its input, 2 operations a weight each, one that is only added to the output twice, as is each where
what products gave is kept; the head twice; no gradient of a weight is taken. Attention as in
`trainer.ceiling`, and once more for the second forward pass where its output is not kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.ceiling import Ceiling, step_flops
from trainer.device import Device
from trainer.lora.pace import Pace, measure_pace
from trainer.lora.targets import adapter_parameters, linear_modules
from trainer.lora.work import StepWork, step_work
from trainer.model.adapter_settings import LoraSettings
from trainer.model.config import ModelConfig
from trainer.model.stages import build_trunk
from trainer.recipe import Recipe
from trainer.vram import StepShape

HALF = 0.5
# Of what asking for an operation takes: a step's own are never as fast as those of a block that is
# visited again and again, and others than those of blocks are not measured.
LEAST_CALLS = 3.0
# The base is brought in once each way.
VISITS = 2
# Forward, again, back to the input; for an adapter also back to itself, each 2 a number.
BLOCK_OPERATIONS, ADAPTER_OPERATIONS, HEAD_OPERATIONS, ATTENTION_OPERATIONS = 6, 8, 4, 16
SPARED_OPERATIONS, KEPT_OPERATIONS = 2, 4
KEPT_ATTENTION_OPERATIONS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Bracket:
    """Tokens a second between `least` and `most`."""

    least: float
    most: float

    @property
    def text(self) -> str:
        """Say it for people."""
        return (
            f"{_rounded(self.least)} to {_rounded(self.most)} tokens/s forecast from rates"
            " measured on this machine: no promise"
        )

    def to_json(self) -> dict[str, float]:
        """Give both ends."""
        return {"tokens_per_second_least": self.least, "tokens_per_second_most": self.most}


def token_operations(
    model: ModelConfig, lora: LoraSettings, seq_len: int, activations: str = "recompute"
) -> float:
    """Give the operations that a token needs; activations: what is kept for the way back."""
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
    attention = model.num_layers * model.num_heads * model.head_dim * seq_len
    is_again = activations == "recompute"
    again = BLOCK_OPERATIONS * multiplied - SPARED_OPERATIONS * spared
    return float(
        (KEPT_OPERATIONS * multiplied if activations == "keep" else again)
        + ADAPTER_OPERATIONS * added
        + HEAD_OPERATIONS * model.vocab_size * model.hidden_size
        + (ATTENTION_OPERATIONS if is_again else KEPT_ATTENTION_OPERATIONS) * attention
    )


def step_operations(recipe: Recipe, activations: str) -> float:
    """Give the operations of a step, of whole weights or beside a frozen base."""
    if recipe.lora is None:
        return step_flops(recipe)
    each = token_operations(recipe.model, recipe.lora, recipe.seq_len, activations)
    return each * recipe.rows_per_step * recipe.seq_len


def bracket(
    recipe: Recipe, lora: LoraSettings, base_bytes: int, ceiling: Ceiling, shape: StepShape
) -> Bracket:
    """Give the bracket; base_bytes: of the frozen base as it is copied."""
    device = Device.from_name(recipe.device)
    pace = measure_pace(shape, lora, device)
    tokens = recipe.rows_per_step * recipe.seq_len
    activations = shape.options.activations
    operations = token_operations(recipe.model, lora, recipe.seq_len, activations) * tokens
    return bracket_of(
        tokens,
        operations,
        VISITS * base_bytes,
        step_work(shape, lora, is_host=device.is_host),
        ceiling,
        pace,
        is_host=device.is_host,
        is_compiled=recipe.compile_blocks,
    )


def bracket_of(
    tokens: int,
    operations: float,
    copied_bytes: float,
    work: StepWork,
    ceiling: Ceiling,
    pace: Pace,
    *,
    is_host: bool,
    is_compiled: bool,
) -> Bracket:
    """Give the bracket of a step of so many tokens and operations."""
    computing = operations / ceiling.matmul_flops_per_second
    copying = copied_bytes / ceiling.copy_bytes_per_second
    calling = work.calls * pace.call_seconds
    passing = work.values * pace.value_seconds
    # What is compiled asks for less and passes less, and how much less is not known.
    most = [computing, copying] if is_compiled else [computing, copying, HALF * calling]
    asking = calling if is_compiled else LEAST_CALLS * calling
    least = computing / HALF + asking + passing + copying
    if is_host:
        beside = 0.0 if is_compiled else calling + HALF * passing
        most = [computing + beside, copying]
    return Bracket(least=tokens / least, most=tokens / max(most))


def _rounded(value: float) -> str:
    """Give three digits of a number, written out."""
    return f"{float(f'{value:.3g}'):,.6g}" if value < 100 else f"{int(float(f'{value:.3g}')):,}"
