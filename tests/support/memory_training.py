"""An engine with a memory store around it, for tests that train a few steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shardb import torch_adaptor
from tests.support.memory_transaction import MemoryStore
from trainer.device import Device
from trainer.engine import Engine, EngineOptions, StepResult
from trainer.model.config import ModelConfig


class MemoryTraining:
    """Initialised at step 0; `step` trains and commits."""

    def __init__(
        self, config: ModelConfig, options: EngineOptions, seed: int = 7, *, poison: bool = True
    ) -> None:
        self.engine = Engine(config, options, Device.from_name("cpu"))
        self.store = MemoryStore(poison=poison)
        self.steps_done = 0
        txn = self.store.begin()
        self.engine.initialise(txn, seed)
        txn.commit()

    def step(self, micro_batches: Sequence[np.ndarray], learning_rate: float = 1e-3) -> StepResult:
        txn = self.store.begin()
        self.steps_done += 1
        result = self.engine.train_step(
            txn, micro_batches, step=self.steps_done, learning_rate=learning_rate
        )
        txn.commit()
        return result

    def params(self) -> dict[str, dict[str, Tensor]]:
        """Give copies of the parameters as params[stage][name]."""
        return {
            stage.name: {
                name: tensor.clone()
                for name, tensor in torch_adaptor.tensors(
                    self.store.read(f"params/{stage.name}")
                ).items()
            }
            for stage in self.engine.stages
        }

    def logits(self, ids: Tensor) -> Tensor:
        return self.engine.logits(self.store, ids)


def random_ids(seed: int, shape: tuple[int, ...], vocab_size: int) -> Tensor:
    return torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(seed))
