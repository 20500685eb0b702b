"""Do lion and adafactor, streamed, give what resident training gives, bit for bit?

The matrix of optimizer, clipping, accumulation and precision is sampled so that each value meets
each other one; the reference for lion is written from the paper, that for adafactor is PyTorch's.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardb import TensorSpec
from tests.parity.test_streamed_equals_resident import SEED, Comparison, options_of
from tests.support.resident import ResidentTrainer
from tests.support.tiny_model import TINY, TINY_QWEN, TINY_TIED
from trainer.device import Device
from trainer.optimizers import lion
from trainer.optimizers.lion import Lion
from trainer.optimizers.tiles import ShardUpdate
from trainer.options import EngineOptions

MATRIX = [
    ("lion", "fp32", "global", 3),
    ("lion", "bf16", "shard", 1),
    ("lion", "fp32", "none", 1),
    ("adafactor", "fp32", "global", 1),
    ("adafactor", "bf16", "shard", 3),
    ("adafactor", "fp32", "none", 3),
]


@pytest.mark.parametrize(("optimizer", "dtype", "clip", "accumulation"), MATRIX)
def test_streamed_equals_resident(optimizer: str, dtype: str, clip: str, accumulation: int) -> None:
    options = replace(options_of(dtype, clip), optimizer=optimizer)
    assert Comparison(TINY, options, accumulation).differences() == []


@pytest.mark.parametrize("optimizer", ["lion", "adafactor"])
def test_streamed_equals_resident_with_tied_embeddings(optimizer: str) -> None:
    options = replace(options_of("fp32", "global"), optimizer=optimizer)
    assert Comparison(TINY_TIED, options, 1).differences() == []


OPTIMIZERS = ["adamw", "lion", "adafactor"]


def matrices_only(optimizer: str) -> EngineOptions:
    options = options_of("fp32", "none")
    return replace(options, optimizer=optimizer, weight_decay_scope="matrices")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_vectors_are_spared_the_decay_as_in_resident_training(optimizer: str) -> None:
    assert Comparison(TINY_QWEN, matrices_only(optimizer), 1).differences() == []


class DecayedVectors(Comparison):
    """The resident side decays vectors too, as if it had not been told."""

    def __init__(self, optimizer: str) -> None:
        options = matrices_only(optimizer)
        super().__init__(TINY_QWEN, options, 1)
        told = replace(options, weight_decay_scope="all")
        self.resident = ResidentTrainer(TINY_QWEN, told, SEED)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_comparison_notices_vectors_that_are_decayed(optimizer: str) -> None:
    found = DecayedVectors(optimizer).differences()
    assert any(name.endswith("norm.weight") for name in found)


class OtherDecay(Comparison):
    """The resident side decays weights a little more."""

    def __init__(self, optimizer: str) -> None:
        options = replace(options_of("fp32", "none"), optimizer=optimizer)
        super().__init__(TINY, options, 1)
        for group in self.resident.optimizer.param_groups:
            group["weight_decay"] *= 1.01


@pytest.mark.parametrize("optimizer", ["lion", "adafactor"])
def test_the_comparison_notices_another_decay(optimizer: str) -> None:
    assert OtherDecay(optimizer).differences() != []


def test_tiles_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _lion_step()
    monkeypatch.setattr(lion, "TILE_ELEMENTS", 64)
    tiled = _lion_step()
    assert all(torch.equal(whole[name], tiled[name]) for name in whole)


def _lion_step() -> dict[str, torch.Tensor]:
    rule = Lion(beta1=0.9, beta2=0.99, weight_decay=0.1)
    generator = torch.Generator().manual_seed(3)
    shape = (41, 19)
    old = torch.randn(shape, generator=generator)
    gradient = torch.randn(shape, generator=generator)
    specs = rule.state_specs({"w": TensorSpec(dtype="F32", shape=shape)})
    momentum = {n: torch.randn(s.shape, generator=generator) for n, s in specs.items()}
    new = {"w": torch.full(shape, torch.nan)}
    state = {n: torch.full(s.shape, torch.nan) for n, s in specs.items()}
    rule.update(
        Device.from_name("cpu"),
        ShardUpdate(
            params={"w": old},
            state=momentum,
            new_params=new,
            new_state=state,
            gradients={"w": gradient},
            gradient_scale=0.5,
            learning_rate=1e-2,
            step=1,
        ),
    )
    return {**new, **state}
