"""Tapes: both ways give the same bits, and neither holds a parameter between the passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.resident import first_values
from tests.support.tiny_model import TINY, TINY_QWEN, random_rows
from trainer.device import Device
from trainer.gradients import GradientSum
from trainer.model.stages import Block, Embeddings, FinalNorm, Stage
from trainer.tape import Compute, KeptTape, ReplayTape
from trainer.timing import StepClock

STAGES: dict[str, Stage] = {
    "embeddings": Embeddings(TINY),
    "block": Block(TINY, 0),
    "block with biases and norms": Block(TINY_QWEN, 1),
    "final norm": FinalNorm(TINY),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Gradients = tuple[dict[str, Tensor], list[Tensor]]


def compute_in(dtype: torch.dtype) -> Compute:
    return Compute(device=Device.from_name("cpu"), dtype=dtype, clock=StepClock())


def parameters(stage: Stage, dtype: torch.dtype) -> dict[str, Tensor]:
    """Give the parameters as views of one image, as a store gives them."""
    values = {name: p.detach() for name, p in first_values(stage, 3).items()}
    dtype = torch.float32 if stage.keeps_master_dtype else dtype
    image = torch.cat([value.flatten() for value in values.values()]).to(dtype)
    parts = image.split([value.numel() for value in values.values()])
    return {n: part.view(values[n].shape) for n, part in zip(values, parts, strict=True)}


def inputs(stage: Stage, dtype: torch.dtype) -> list[Tensor]:
    if isinstance(stage, Embeddings):
        return [torch.from_numpy(random_rows(seed)) for seed in (1, 2)]
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(2, 9, 48, generator=generator).to(dtype) for _ in range(2)]


def run(
    kind: Callable[..., Any], stage: Stage, dtype: torch.dtype, between: Callable[[Tensor], None]
) -> Gradients:
    """Run forward, let `between` have every parameter of the forward pass, run backward."""
    params = parameters(stage, dtype)
    tape = kind(stage, compute_in(dtype), params, inputs(stage, dtype))
    for parameter in params.values():
        between(parameter)
    total = GradientSum()
    generator = torch.Generator().manual_seed(4)
    ones = [torch.randn(y.shape, generator=generator).to(dtype) for y in tape.outputs]
    tape.backward(parameters(stage, dtype), ones, total)
    return total.gradients, ones


def leave(parameter: Tensor) -> None:
    assert parameter.numel()


def poison(parameter: Tensor) -> None:
    parameter.fill_(torch.nan)


def equal(one: Gradients, other: Gradients) -> bool:
    return (
        one[0].keys() == other[0].keys()
        and all(torch.equal(one[0][name], other[0][name]) for name in one[0])
        and all(torch.equal(x, y) for x, y in zip(one[1], other[1], strict=True))
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", STAGES)
def test_keeping_and_replaying_give_the_same_bits(name: str, dtype: str) -> None:
    replayed, kept = (
        run(kind, STAGES[name], DTYPES[dtype], leave) for kind in (ReplayTape, KeptTape)
    )
    assert equal(replayed, kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [ReplayTape, KeptTape])
@pytest.mark.parametrize("name", STAGES)
def test_no_parameter_is_held_between_the_passes(
    name: str, kind: Callable[..., Any], dtype: str
) -> None:
    clean = run(kind, STAGES[name], DTYPES[dtype], leave)
    assert equal(clean, run(kind, STAGES[name], DTYPES[dtype], poison))


class HoldingTape(KeptTape):
    """Control: a tape that lets autograd keep the parameters."""

    def _pack(self, saved: Tensor) -> Tensor:
        return saved


def test_control_a_held_parameter_is_noticed() -> None:
    stage = STAGES["block"]
    clean = run(HoldingTape, stage, torch.float32, leave)
    assert not equal(clean, run(HoldingTape, stage, torch.float32, poison))
