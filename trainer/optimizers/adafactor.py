"""Adafactor (Shazeer and Stern 2018, arXiv:1804.04235) over one shard, one tensor at a time.

Owns the names and shapes of its factored state: a matrix [R, C] keeps R + C numbers instead of
R * C. The arithmetic is PyTorch's own `torch.optim.Adafactor`, whose learning rate is a bound on
the relative step. Its means and norms run over whole tensors, so a tensor is the tile here: the
largest tensor, not the shard, bounds the memory. Knows nothing of stores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardb import TensorSpec
from trainer.device import Device
from trainer.optimizers.tiles import ShardUpdate, split_by_decay


@dataclass(frozen=True, kw_only=True, slots=True)
class Adafactor:
    """Settings of the rule, with the names of `torch.optim.Adafactor`."""

    weight_decay: float
    decay_matrices_only: bool = False
    beta2_decay: float = -0.8
    clip_threshold: float = 1.0
    relative_eps: float = 1e-3

    def state_specs(self, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """Give the state that belongs to parameters of these specs; it starts at zero."""
        found: dict[str, TensorSpec] = {}
        for name, spec in specs.items():
            for state, shape in _state_shapes(spec.shape).items():
                found[f"{name}.{state}"] = TensorSpec(dtype="F32", shape=shape)
        return found

    def update(self, device: Device, shard: ShardUpdate) -> None:
        """Write the shard's next values; gradients are scaled in place and used up."""
        parts = split_by_decay(
            shard, weight_decay=self.weight_decay, matrices_only=self.decay_matrices_only
        )
        for names, weight_decay in parts:
            for name in names:
                self._update_tensor(device, shard, name, weight_decay)

    def _update_tensor(
        self, device: Device, shard: ShardUpdate, name: str, weight_decay: float
    ) -> None:
        states = list(_state_shapes(tuple(shard.params[name].shape)))
        keys = [f"{name}.{state}" for state in states]
        sources = [shard.params[name], *(shard.state[key] for key in keys)]
        targets = [shard.new_params[name], *(shard.new_state[key] for key in keys)]
        values, (gradient,) = device.open_tile(sources, targets, [shard.gradients[name]])
        if shard.gradient_scale != 1.0:
            gradient.mul_(shard.gradient_scale)
        self._step(shard, values, gradient, states, weight_decay)
        device.close_tile(values, targets)

    def _step(
        self,
        shard: ShardUpdate,
        values: list[Tensor],
        gradient: Tensor,
        states: list[str],
        weight_decay: float,
    ) -> None:
        parameter = values[0].requires_grad_()
        parameter.grad = gradient
        optimizer = torch.optim.Adafactor(
            [parameter],
            lr=shard.learning_rate,
            beta2_decay=self.beta2_decay,
            eps=(None, self.relative_eps),
            d=self.clip_threshold,
            weight_decay=weight_decay,
        )
        # The optimizer counts the step up before it uses it.
        optimizer.state[parameter] = {
            "step": torch.tensor(float(shard.step - 1)),
            **dict(zip(states, values[1:], strict=True)),
        }
        optimizer.step()  # type: ignore[no-untyped-call]
        parameter.grad = None
        parameter.requires_grad_(False)


def _state_shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Rows' and columns' mean squares of a matrix, the squares themselves of a vector."""
    if len(shape) < 2:
        return {"variance": shape}
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}
