"""Does the pipeline give the same bits when stages pass through a second device?

On a CPU that device is host memory too, so this holds what is copied, when, and from which step. On
two GPUs the same runs go over peer copies.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.parity.test_pipeline_equals_resident import BITES_SOMETIMES, Pipelined
from tests.parity.test_streamed_equals_resident import options_of
from tests.support.tiny_model import TINY, TINY_TIED
from trainer.device import Device
from trainer.engine import EngineOptions
from trainer.errors import InputError
from trainer.model.config import ModelConfig
from trainer.pipeline.peering import Peer

GPUS = torch.cuda.device_count()
two_gpus = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=two_gpus)]


def through_second(config: ModelConfig, options: EngineOptions, device: str) -> Pipelined:
    """Give the comparison with a second device; a CPU is its own."""
    if device != "cpu":
        return Pipelined(config, replace(options, prefetch="secondary-gpu"), 3, device)
    comparison = Pipelined(config, options, 3)
    pipeline = comparison.engine.pipeline
    assert pipeline is not None
    pipeline.peer = Peer(pipeline.lanes, pipeline.shapes, Device.from_name("cpu"))
    return comparison


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("config", "dtype", "clip"),
    [(TINY, "bf16", "global"), (TINY_TIED, "fp32", "shard"), (TINY_TIED, "bf16", "none")],
)
def test_a_second_device_changes_nothing(
    config: ModelConfig, dtype: str, clip: str, device: str
) -> None:
    options = options_of(dtype, clip)
    if clip == "global":
        options = replace(options, max_grad_norm=BITES_SOMETIMES[3])
    comparison = through_second(config, options, device)
    assert comparison.differences() == []
    pipeline = comparison.engine.pipeline
    assert pipeline is not None
    assert pipeline.peer is not None
    # Each stage is brought at most once a step, though both passes use it, and again where a step
    # is clipped; what is on the first device already is not brought. One step more was begun.
    begun = pipeline.steps_done + 1
    streamed = len(pipeline.shapes) - len(pipeline.residents)
    assert pipeline.steps_done <= pipeline.peer.copies
    assert pipeline.peer.copies <= begun * streamed * (2 if clip == "global" else 1)


def test_control_a_stage_of_the_step_before_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = through_second(TINY, options_of("fp32", "none"), "cpu")
    pipeline = comparison.engine.pipeline
    assert pipeline is not None
    assert pipeline.peer is not None
    peer = pipeline.peer
    bring = peer.bring

    def once(base: object, names: object) -> None:
        if not peer.copies:
            bring(base, names)  # type: ignore[arg-type]

    monkeypatch.setattr(peer, "bring", once)
    assert comparison.differences() != []


@pytest.mark.parametrize("device", DEVICES)
def test_stages_without_room_there_come_from_the_host(device: str) -> None:
    comparison = through_second(TINY, options_of("bf16", "global"), device)
    pipeline = comparison.engine.pipeline
    assert pipeline is not None
    assert pipeline.peer is not None
    del pipeline.peer._held["block_001"]
    assert "block_001" not in pipeline.peer
    assert comparison.differences() == []


@pytest.mark.skipif(GPUS != 1, reason="needs exactly one CUDA device")
@pytest.mark.gpu
def test_one_device_alone_is_refused() -> None:
    with pytest.raises(InputError, match="secondary-gpu: there is one CUDA device"):
        Device.from_name("cuda").second()
