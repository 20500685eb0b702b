"""AdamW over a shard: tiles change no bit, old values stay, decay reaches what it should."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardb import TensorSpec
from trainer.device import Device
from trainer.optimizers import adamw
from trainer.optimizers.adamw import AdamW, ShardUpdate

SHAPES = {"a.weight": (61, 37), "norm.weight": (37,), "b.weight": (5, 3), "b.bias": (5,)}
RULE = AdamW(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
STEPS = 4


def decay_everything(name: str) -> float:
    assert name in SHAPES
    return 0.1


def gradients_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def train(rule: AdamW, scale: float = 1.0) -> dict[str, Tensor]:
    """Give parameters and state after some steps, from old to new buffers each time."""
    params = {name: torch.linspace(-1, 1, g.numel()).view_as(g) for name, g in
              gradients_of(0).items()}  # fmt: skip
    specs = {name: TensorSpec(dtype="F32", shape=shape) for name, shape in SHAPES.items()}
    state = {name: torch.zeros(spec.shape) for name, spec in rule.state_specs(specs).items()}
    for step in range(1, STEPS + 1):
        new_params = {name: torch.full_like(t, torch.nan) for name, t in params.items()}
        new_state = {name: torch.full_like(t, torch.nan) for name, t in state.items()}
        before = {**{n: t.clone() for n, t in params.items()}, **state}
        rule.update(
            Device.from_name("cpu"),
            ShardUpdate(
                params=params,
                state=state,
                new_params=new_params,
                new_state=new_state,
                gradients=gradients_of(step),
                gradient_scale=scale,
                learning_rate=1e-2 * step,
                step=step,
            ),
        )
        assert all(torch.equal({**params, **state}[name], before[name]) for name in before)
        params, state = new_params, new_state
    return {**params, **state}


def reference(groups: Callable[[str], float], scale: float = 1.0) -> dict[str, Tensor]:
    params = {
        name: torch.linspace(-1, 1, g.numel()).view_as(g).clone().requires_grad_()
        for name, g in gradients_of(0).items()
    }
    optimizer = torch.optim.AdamW(
        [{"params": [p], "weight_decay": groups(name)} for name, p in params.items()],
        betas=(0.9, 0.95),
        eps=1e-8,
        fused=True,
    )
    for step in range(1, STEPS + 1):
        for name, gradient in gradients_of(step).items():
            params[name].grad = gradient * scale
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * step
        optimizer.step()
    found = {name: p.detach() for name, p in params.items()}
    for name, p in params.items():
        for moment in adamw.STATE_NAMES:
            found[f"{name}.{moment}"] = optimizer.state[p][moment]
    return found


def differing(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    assert mine.keys() == theirs.keys()
    return [name for name in mine if not torch.equal(mine[name], theirs[name])]


@pytest.mark.parametrize("tile_elements", [16, 64, 1024, 1 << 20])
def test_tiles_change_no_bit(tile_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "TILE_ELEMENTS", tile_elements)
    assert differing(train(RULE), reference(decay_everything)) == []


def test_gradients_are_scaled_first() -> None:
    assert differing(train(RULE, scale=0.3), reference(decay_everything, scale=0.3)) == []


def test_matrices_only_spares_vectors() -> None:
    spare = AdamW(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, decay_matrices_only=True)
    expected = reference(lambda name: 0.1 if len(SHAPES[name]) > 1 else 0.0)
    assert differing(train(spare), expected) == []
    assert differing(train(RULE), expected) == ["norm.weight", "b.bias"]


def test_control_another_beta_is_noticed() -> None:
    other = AdamW(beta1=0.9, beta2=0.951, eps=1e-8, weight_decay=0.1)
    assert differing(train(other), reference(decay_everything)) != []


def test_tile_is_a_multiple_of_every_vector_width() -> None:
    assert adamw.TILE_ELEMENTS % 64 == 0


def test_state_specs() -> None:
    specs = RULE.state_specs({"w": TensorSpec(dtype="F32", shape=(2, 3))})
    assert specs == {
        "w.exp_avg": TensorSpec(dtype="F32", shape=(2, 3)),
        "w.exp_avg_sq": TensorSpec(dtype="F32", shape=(2, 3)),
    }
