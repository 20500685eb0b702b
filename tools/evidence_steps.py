"""What the search of sizes tries: a few steps of training, resident and streamed.

Owns the ways of training that are compared, and the cap. Knows nothing of which sizes are tried.
Every way computes with the same blocks, compiled where the options say so; a device's cap holds for
the whole process until the next one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tests.support.memory_transaction import MemoryStore
from tests.support.resident import optimizer_of
from tools.bench.gpu_arms import Compiled
from trainer.device import Device
from trainer.engine import Engine, EngineOptions
from trainer.model.config import ModelConfig
from trainer.model.stages import build_head, build_stages, build_trunk
from trainer.pipeline.pipeline import PipelineSettings

SEQ_LEN = 512
# The second step has the optimizer's state, the third replays what was recorded.
STEPS = 3
PIPELINE = PipelineSettings(activations_on_host=True, gradients="recompute")


class Whole(Compiled):
    """Resident training; its values are drawn on the device, for only their sizes matter here."""

    def __init__(self, model: ModelConfig, options: EngineOptions, device: str) -> None:
        self.config, self.options, self.device = model, options, device
        self.dtype = torch.bfloat16
        self.trunk, self.head = build_trunk(model), build_head(model)
        self.params = {
            stage.name: {
                name: torch.empty(each.shape, device=device).normal_(0.0, 0.02).requires_grad_()
                for name, each in stage.parameters.items()
            }
            for stage in build_stages(model)
        }
        every = [p for shard in self.params.values() for p in shard.values()]
        self.optimizer = optimizer_of(options, every)


class Checkpointed(Whole):
    """Resident training that keeps only what lies between the blocks."""

    is_checkpointed = True


class Capped:
    """A device whose memory is capped for this process; on a processor nothing is.

    What is tried through it has to train on `device`: that alone knows what recordings hold.
    """

    def __init__(self, name: str, cap_bytes: int | None = None) -> None:
        self.device = Device.from_name(name)
        if cap_bytes is not None:
            self.device.limit_memory(cap_bytes)

    def tried(self, attempt: Callable[[], None]) -> int | None:
        """Make an attempt and give the bytes tensors took at most, None where it did not fit."""
        self._forget()
        try:
            attempt()
            self.device.wait()
            return self.device.peak_bytes()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None
        finally:
            self._forget()

    def _forget(self) -> None:
        if not self.device.is_host:
            # Sizes differ, and so many kinds of one function are not kept.
            torch._dynamo.reset()
        gc.collect()
        self.device.forget_peak()


def is_out_of_memory(error: BaseException | None) -> bool:
    """Say whether a device had no room: a recording that breaks off hides that behind its own."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def new_store(model: ModelConfig) -> MemoryStore:
    """Make a store in host memory with the first values of a model."""
    store = MemoryStore(poison=False)
    txn = store.begin()
    Engine(model, EngineOptions(), Device.from_name("cpu")).initialise(txn, 1)
    txn.commit()
    return store


def resident_steps(trainer: Whole, _device: Device, rows: int) -> None:
    """Train a few steps with all of a model in the device's memory, where it is already."""
    for _ in range(STEPS):
        trainer.step([_ids(trainer.config, rows)], 1e-4)


def streamed_options(options: EngineOptions) -> EngineOptions:
    """Give the options of a way of training with what waits between the passes on the host."""
    return replace(options, activation_placement="host")


def streamed_steps(
    store: MemoryStore, model: ModelConfig, options: EngineOptions, device: Device, rows: int
) -> None:
    """Train a few steps through the pipeline, from a store in host memory."""
    engine = Engine(model, streamed_options(options), device)
    engine.use_pipeline(PIPELINE)
    try:
        for step in range(1, STEPS + 1):
            txn = store.begin()
            engine.train_step(txn, [_ids(model, rows)], step=step, learning_rate=1e-4)
            txn.commit()
        assert engine.pipeline_steps == STEPS, "the steps went another way"
    finally:
        engine.close()


def _ids(model: ModelConfig, rows: int) -> Any:
    return np.random.default_rng(0).integers(0, model.vocab_size, (rows, SEQ_LEN + 1))
