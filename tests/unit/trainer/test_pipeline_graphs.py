"""Does a recorded pass give what the pass itself gives, whatever was computed in between?"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from tests.support.tiny_model import TINY
from trainer.device import Device
from trainer.device_lanes import HostLanes
from trainer.gradients import PlacedSum
from trainer.model.stages import Stage, build_trunk
from trainer.pipeline.graphs import Passes
from trainer.tape import Compute
from trainer.timing import StepClock

T = TypeVar("T")


class RepeatingLanes(HostLanes):
    """Lanes whose recordings do their work again, into the tensors that they gave first."""

    def __init__(self) -> None:
        super().__init__()
        self.captured = 0

    def capture(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        result = work()
        self.captured += 1
        kept = result if isinstance(result, tuple) else (result,)

        def again() -> None:
            new = work()
            for old, value in zip(kept, new if isinstance(new, tuple) else (new,), strict=True):
                assert isinstance(old, Tensor)
                old.copy_(value)

        return result, again


def stages() -> dict[str, Stage]:
    trunk = build_trunk(TINY)
    return {"block": trunk[1], "norm": trunk[-1]}


def tensors(stage: Stage, seed: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(each.shape, generator=random) for name, each in stage.parameters.items()
    }
    x, gradient = (torch.randn(2, 8, TINY.hidden_size, generator=random) for _ in range(2))
    return weights, x, gradient


@pytest.mark.parametrize("order", [["block", "norm"], ["norm", "block"]])
def test_does_a_recording_give_what_the_pass_gives(order: list[str]) -> None:
    lanes = RepeatingLanes()
    recorded, plain = Passes(lanes), Passes(HostLanes())
    recorded.may_record = True
    device = Device.from_name("cpu")
    compute = Compute(device=device, dtype=torch.float32, clock=StepClock(), blocks=None)
    fixed = {name: tensors(stage, 0)[0] for name, stage in stages().items()}
    for seed in range(1, 4):
        for name in order:
            stage = stages()[name]
            weights, x, gradient = tensors(stage, seed)
            for key, tensor in weights.items():  # a recording has its weights where they were
                fixed[name][key].copy_(tensor)
            outputs, sums, backs = [], [], []
            for passes in (recorded, plain):
                total = PlacedSum({k: torch.full_like(v, torch.nan) for k, v in weights.items()})
                outputs.append(passes.forward(compute, stage, fixed[name], x))
                back = passes.backward(compute, stage, fixed[name], x, gradient.clone(), total)
                backs.append(back.clone())
                sums.append(total.gradients)
            assert torch.equal(*outputs)
            assert torch.equal(*backs)
            assert all(torch.equal(sums[0][key], sums[1][key]) for key in weights)
    assert lanes.captured == 4
