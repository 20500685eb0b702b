"""Weights stored in bf16: the update in fp32, the result rounded up or down by chance.

Owns the rounding and the stored form of weights. Rounding to nearest would lose every update
smaller than half a bf16 step; a number rounded up with the probability of its place between its two
neighbours is right on average (Gupta et al. 2015, arXiv:1502.02551). The chance is a hash of seed,
step, shard, tensor and place (SplitMix64; Steele, Lea and Flood 2014), so it is the same on every
device, in every order, and after every resume. Knows nothing of stores. Inexact against fp32
masters. Memory: one fp32 copy of the largest tensor, and rounding works in tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import xxhash
from torch import Tensor

from shardb import TensorSpec
from trainer.device import Device
from trainer.optimizers.rule import UpdateRule
from trainer.optimizers.tiles import ShardUpdate

TILE_ELEMENTS = 1 << 20
_STRIDE = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LOW_BITS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Bf16Masters:
    """A rule whose weights are bf16 tensors; its state is that of the rule inside."""

    inner: UpdateRule
    seed: int

    def state_specs(self, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """Give the state that belongs to parameters of these specs; it starts at zero."""
        return self.inner.state_specs(specs)

    def update(self, device: Device, shard: ShardUpdate) -> None:
        """Write the shard's next values; gradients are scaled in place and used up."""
        for name, gradient in shard.gradients.items():
            weights = {name: device.to_device(shard.params[name]).float()}
            one = replace(shard, gradients={name: gradient}, params=weights, new_params=weights)
            self.inner.update(device, one)
            place = f"{self.seed}/{shard.step}/{shard.name}/{name}"
            key = xxhash.xxh3_64_intdigest(place.encode())
            source, target = weights[name].view(-1), shard.new_params[name].view(-1)
            for start in range(0, source.numel(), TILE_ELEMENTS):
                run = slice(start, start + TILE_ELEMENTS)
                target[run].copy_(round_by_chance(source[run], key, start))


def stored_specs(specs: Mapping[str, TensorSpec], dtype: str) -> dict[str, TensorSpec]:
    """Give the form in which weights of these specs are stored, for `fp32` or `bf16`."""
    if dtype == "fp32":
        return dict(specs)
    return {name: TensorSpec(dtype="BF16", shape=spec.shape) for name, spec in specs.items()}


def round_by_chance(values: Tensor, key: int, start: int) -> Tensor:
    """Round fp32 to bf16; element i uses number `start + i` of the sequence of `key`."""
    bits = values.contiguous().view(torch.int32)
    noise = _noise(key, start, values.numel(), values.device).to(torch.int32)
    # Below the 16 bits that go, noise carries over into those that stay, or does not.
    rounded = (bits + noise).bitwise_and_(-(1 << _LOW_BITS))
    return rounded.view(torch.float32).to(torch.bfloat16)


def _noise(key: int, start: int, count: int, device: torch.device) -> Tensor:
    """Give `count` numbers of 16 bits; products wrap around, as the sequence wants it."""
    places = torch.arange(start + 1, start + 1 + count, dtype=torch.int64, device=device)
    z = places.mul_(_signed(_STRIDE)).add_(_signed(key))
    for shift, factor in _MIX:
        z = (z ^ _shifted(z, shift)).mul_(_signed(factor))
    z = z ^ _shifted(z, 31)
    return _shifted(z, 64 - _LOW_BITS)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift right with zeros coming in: torch shifts the sign in."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
