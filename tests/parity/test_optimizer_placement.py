"""Is a shard's update the same on the processor, beside the device, as where the step computes?

On a CPU both are the same kernel, so this holds the thread, the order and what is held meanwhile.
On a GPU the kernels round otherwise: there a run is compared with resident training that updates
the same stages on the processor, and how far the two kernels are apart is measured.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.parity.test_streamed_equals_resident import Comparison, options_of
from tests.support.tiny_model import TINY, TINY_TIED
from trainer import step as steps
from trainer.device import Device
from trainer.engine import EngineOptions, StepResult
from trainer.host_updates import PENDING_MAX, HostUpdates
from trainer.model.config import ModelConfig
from trainer.optimizers.adamw import AdamW
from trainer.optimizers.tiles import ShardUpdate

SPLIT = ("block_002", "block_000", "embeddings")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Placed(Comparison):
    """The comparison, with some shards active beside the one in work."""

    def check_counts(self, streamed: StepResult) -> None:
        assert streamed.updated_shards == len(self.engine.stages)
        assert 1 < streamed.max_active_optimizer_shards <= 1 + PENDING_MAX


def on_host(options: EngineOptions, *stages: str) -> EngineOptions:
    place = "split" if stages else "cpu"
    return replace(options, optimizer_device=place, optimizer_host_stages=stages)


@pytest.mark.parametrize("stages", [(), SPLIT], ids=["cpu", "split"])
@pytest.mark.parametrize(
    ("config", "clip", "optimizer"),
    [
        (TINY, "global", "adamw"),
        (TINY, "shard", "lion"),
        (TINY_TIED, "none", "adamw"),
        (TINY_TIED, "global", "adafactor"),
    ],
)
def test_updates_beside_the_device_change_nothing(
    config: ModelConfig, clip: str, optimizer: str, stages: tuple[str, ...]
) -> None:
    options = replace(options_of("bf16", clip), optimizer=optimizer)
    assert Placed(config, on_host(options, *stages), 2).differences() == []


def test_control_an_update_with_another_scale_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    write: Any = steps.write_update

    def other(*arguments: Any, **place: Any) -> None:
        *rest, scale = arguments
        write(*rest, 0.5 if place else scale, **place)

    monkeypatch.setattr(steps, "write_update", other)
    options = on_host(options_of("fp32", "none"), "block_001")
    assert Placed(TINY, options, 1).differences() != []


def test_an_error_of_an_update_ends_the_step() -> None:
    host = HostUpdates()

    def fails() -> None:
        raise RuntimeError("no")

    host.give(fails)
    with pytest.raises(RuntimeError, match="no"):
        host.finish()
    host.close()


@pytest.mark.gpu
@needs_cuda
def test_two_runs_with_the_same_split_are_equal_on_a_gpu() -> None:
    options = on_host(options_of("bf16", "global"), *SPLIT)
    one, two = (Comparison(TINY, options, 1, "cuda") for _ in range(2))
    for comparison in (one, two):
        for step in range(1, 6):
            comparison.train(step, 1e-3)
    first, second = one.store.arrays(), two.store.arrays()
    assert [name for name in first if (first[name] != second[name]).any()] == []


@pytest.mark.gpu
@needs_cuda
def test_how_far_the_kernels_are_apart() -> None:
    """Some last bits differ after one step, by a rounding or two of the terms that are summed."""
    count, rule = 1 << 20, AdamW(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    draw = torch.Generator().manual_seed(0)
    old, gradient, first = (torch.randn(count, generator=draw) for _ in range(3))
    second = torch.rand(count, generator=draw)
    found = []
    for device in (Device.from_name("cpu"), Device.from_name("cuda")):
        new, m, v = (torch.empty(count) for _ in range(3))
        rule.update(
            device,
            ShardUpdate(
                params={"w": old},
                state={"w.exp_avg": first, "w.exp_avg_sq": second},
                new_params={"w": new},
                new_state={"w.exp_avg": m, "w.exp_avg_sq": v},
                gradients={"w": gradient.clone().to(device.torch_device)},
                gradient_scale=1.0,
                learning_rate=1e-3,
                step=7,
            ),
        )
        device.wait()
        found.append([new, m, v])
    apart = [(a - b).abs() for a, b in zip(*found, strict=True)]
    told = [(float(each.max()), float((each > 0).double().mean())) for each in apart]
    print("apart at most, share of elements that differ:", told)
    # All values are below 8, where a rounding is at most 2.4e-7.
    assert all(0 < most < 1e-6 for most, _ in told)
