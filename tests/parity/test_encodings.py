"""Do state in fewer bits and bf16 weights, streamed, give what resident training with them gives?

They are inexact against fp32, and as exact as fp32 between the two ways. The resident side's codes
and rounding are written anew, over whole tensors, in numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor

from tests.parity.test_streamed_equals_resident import SEED, Comparison, options_of
from tests.support.resident import ResidentStep, ResidentTrainer
from tests.support.tiny_model import TINY, TINY_TIED
from trainer.model.config import ModelConfig
from trainer.optimizers import adamw, bf16_masters
from trainer.optimizers.bf16_masters import round_by_chance
from trainer.options import EngineOptions

Arrays = dict[str, np.ndarray]


def bf16_bits(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)


def of_bf16_bits(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def coded(values: np.ndarray, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of 256 of the flattened tensor, linear in the block's largest magnitude."""
    count = -(-values.size // 256)
    blocks = np.zeros(count * 256, dtype=np.float32)
    blocks[: values.size] = values.reshape(-1)
    blocks = blocks.reshape(count, 256)
    scale = np.abs(blocks).max(axis=1) / np.float32(levels)
    safe = np.where(scale > 0, scale, np.float32(1))[:, None]
    code = np.rint(blocks / safe)
    if levels == 255:
        code = np.where(blocks > 0, np.maximum(code, 1), code)
    kind = np.uint8 if levels == 255 else np.int8
    return code.reshape(-1)[: values.size].reshape(values.shape).astype(kind), scale


def decoded(code: np.ndarray, scale: np.ndarray) -> np.ndarray:
    each = np.repeat(scale, 256)[: code.size].reshape(code.shape)
    return code.astype(np.float32) * each


def rounded_by_chance(values: np.ndarray, place: str) -> np.ndarray:
    """Give bf16 bits: SplitMix64 seeded by the place's digest, added below the bits that stay."""
    with np.errstate(over="ignore"):
        key = np.uint64(xxhash.xxh3_64_intdigest(place.encode()))
        z = key + np.arange(1, values.size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    noise = (z >> np.uint64(48)).astype(np.uint32)
    return ((values.reshape(-1).view(np.uint32) + noise) >> 16).astype(np.uint16)


class ResidentEncoded(ResidentTrainer):
    """Keeps everything in fp32 and puts it through its stored form after each step."""

    def __init__(self, config: ModelConfig, options: EngineOptions, device: str) -> None:
        super().__init__(config, replace(options, optimizer_state_dtype="fp32"), SEED, device)
        self.encoded = options
        self.steps_done = 0
        self.stored: Arrays = {}
        if options.master_weight_dtype == "bf16":
            for _, _, p in self._each():
                p.data = p.data.bfloat16().float()

    def step(self, micro_batches: Sequence[np.ndarray], learning_rate: float) -> ResidentStep:  # type: ignore[override]
        result = super().step(micro_batches, learning_rate)
        assert result is not None
        self.steps_done += 1
        self.stored = {}
        for stage, name, p in self._each():
            self._store_weights(stage, name, p)
            self._store_moments(f"optim/{stage}:{name}", self.optimizer.state[p])
        return result

    def arrays(self) -> Arrays:
        return self.stored

    def _each(self) -> list[tuple[str, str, Tensor]]:
        return [(s, n, p) for s, shard in self.params.items() for n, p in shard.items()]

    def _store_weights(self, stage: str, name: str, p: Tensor) -> None:
        values = p.detach().cpu().numpy()
        if self.encoded.master_weight_dtype == "fp32":
            self.stored[f"params/{stage}:{name}"] = values.copy()
            return
        place = f"{self.encoded.seed}/{self.steps_done}/{stage}/{name}"
        bits = rounded_by_chance(values, place).reshape(values.shape)
        self.stored[f"params/{stage}:{name}"] = bits
        p.data = torch.from_numpy(of_bf16_bits(bits)).to(self.device)

    def _store_moments(self, name: str, state: dict[str, Tensor]) -> None:
        for moment in ("exp_avg", "exp_avg_sq"):
            if moment not in state:
                continue
            values, key = state[moment].cpu().numpy(), f"{name}.{moment}"
            if self.encoded.optimizer_state_dtype == "fp32":
                self.stored[key] = values.copy()
                continue
            if self.encoded.optimizer_state_dtype == "bf16":
                self.stored[key] = bf16_bits(values)
                back = of_bf16_bits(self.stored[key])
            elif moment == "exp_avg":
                self.stored[key], self.stored[f"{key}.scale"] = coded(values, 127)
                back = decoded(self.stored[key], self.stored[f"{key}.scale"])
            else:
                self.stored[key], self.stored[f"{key}.scale"] = coded(np.sqrt(values), 255)
                back = decoded(self.stored[key], self.stored[f"{key}.scale"]) ** 2
            state[moment].copy_(torch.from_numpy(back))


class EncodedComparison(Comparison):
    """The resident side encodes as the options say, or as `resident` says otherwise."""

    def __init__(
        self,
        config: ModelConfig,
        options: EngineOptions,
        accumulation: int,
        resident: EngineOptions | None = None,
        device: str = "cpu",
    ) -> None:
        super().__init__(config, options, accumulation, device)
        self.resident = ResidentEncoded(config, resident or options, device)


def encoded_options(dtype: str, clip: str, **more: str) -> EngineOptions:
    return replace(options_of(dtype, clip), seed=11, **more)


@pytest.mark.parametrize(
    ("config", "dtype", "clip", "accumulation", "encoding"),
    [
        (TINY, "fp32", "global", 1, "int8"),
        (TINY, "bf16", "shard", 3, "int8"),
        (TINY_TIED, "fp32", "none", 1, "int8"),
        (TINY, "bf16", "global", 1, "bf16"),
        (TINY, "fp32", "shard", 3, "bf16"),
    ],
)
def test_encoded_state_streamed_equals_resident(
    config: ModelConfig, dtype: str, clip: str, accumulation: int, encoding: str
) -> None:
    options = encoded_options(dtype, clip, optimizer_state_dtype=encoding)
    assert EncodedComparison(config, options, accumulation).differences() == []


@pytest.mark.parametrize(
    ("config", "dtype", "clip", "optimizer", "encoding"),
    [
        (TINY, "fp32", "global", "adamw", "fp32"),
        (TINY, "bf16", "shard", "adamw", "int8"),
        (TINY_TIED, "bf16", "global", "lion", "fp32"),
        (TINY, "fp32", "none", "lion", "fp32"),
    ],
)
def test_bf16_weights_streamed_equal_resident(
    config: ModelConfig, dtype: str, clip: str, optimizer: str, encoding: str
) -> None:
    options = encoded_options(
        dtype,
        clip,
        optimizer=optimizer,
        optimizer_state_dtype=encoding,
        master_weight_dtype="bf16",
    )
    assert EncodedComparison(config, options, 1).differences() == []


def test_tiles_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "TILE_ELEMENTS", 512)
    monkeypatch.setattr(bf16_masters, "TILE_ELEMENTS", 192)
    options = encoded_options(
        "fp32", "global", optimizer_state_dtype="int8", master_weight_dtype="bf16"
    )
    assert EncodedComparison(TINY, options, 1).differences() == []


@pytest.mark.parametrize(
    ("streamed", "resident"),
    [
        ({"optimizer_state_dtype": "int8"}, {"optimizer_state_dtype": "bf16"}),
        ({"optimizer_state_dtype": "bf16"}, {"optimizer_state_dtype": "fp32"}),
        ({"master_weight_dtype": "bf16"}, {"master_weight_dtype": "bf16", "seed": 12}),
    ],
)
def test_control_another_encoding_or_seed_is_noticed(
    streamed: dict[str, str], resident: dict[str, str]
) -> None:
    options = encoded_options("fp32", "global", **streamed)
    other = replace(encoded_options("fp32", "global"), **resident)
    comparison = EncodedComparison(TINY, options, 1, other)
    try:
        found = comparison.differences()
    except AssertionError as names_differ:
        found = [str(names_differ)]
    assert found != []


def test_rounding_by_chance_is_right_on_average() -> None:
    values = torch.full((1 << 16,), 1.0 + 0.25 / 128)
    rounded = round_by_chance(values, 1, 0).float()
    assert set(rounded.tolist()) == {1.0, 1.0 + 1 / 128}
    assert abs(float((rounded > 1.0).float().mean()) - 0.25) < 0.01
    assert not torch.equal(rounded, round_by_chance(values, 2, 0).float())
    exact = torch.tensor([0.0, -0.0, 1.5, -3.0, 65280.0])
    assert torch.equal(round_by_chance(exact, 7, 0).float(), exact)
