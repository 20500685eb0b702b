"""The trainer's own step as a verb of generated crash workloads.

Owns a tiny model, whose engine stages a step through the transaction API as it does for a real one.
"""

from __future__ import annotations

import numpy as np

from shardb import Transaction
from shardb.testing.bases import Base
from shardb.testing.verbs import Scene, small_base
from trainer.device import Device
from trainer.engine import Engine
from trainer.model.config import ModelConfig
from trainer.options import EngineOptions

TRAIN = "train"
LEARNING_RATE = 1e-2
TINY = ModelConfig(
    vocab_size=24,
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=24,
    max_position_embeddings=16,
)


def train_step(scene: Scene) -> None:
    """One step of the engine on main."""
    scene.commit_with(stage_step)


def training_base(root: str) -> Base:
    """A store with the steps of a tiny run, made in the empty directory `root`."""
    return small_base(root, first=stage_initial, following=stage_step)


def _engine() -> Engine:
    return Engine(TINY, EngineOptions(), Device.from_name("cpu"))


def stage_initial(transaction: Transaction) -> None:
    """The first parameters and optimizer state of the tiny run."""
    _engine().initialise(transaction, seed=7)


def stage_step(transaction: Transaction) -> None:
    """The step behind the base; its bytes follow from the bytes of that and its number."""
    assert transaction.base is not None
    step = transaction.base.step + 1
    draw = np.random.default_rng(step)
    rows = draw.integers(0, TINY.vocab_size, size=(2, 9))
    _engine().train_step(transaction, [rows], step=step, learning_rate=LEARNING_RATE)
