"""The trainer's own step as a verb of generated crash workloads, with and without an active store.

Owns a tiny model, whose engine stages a step through the transaction API as it does for a real one,
and the two stores that the trainer publishes a step between.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

import shardb
from shardb import Commit, Transaction
from shardb.errors import LogTruncatedError, ShardbError
from shardb.testing.bases import Base
from shardb.testing.explorer import STORE
from shardb.testing.verbs import QUICK, Scene, small_base
from trainer.active import Publishing, TwoTiers
from trainer.device import Device
from trainer.engine import Engine
from trainer.model.config import ModelConfig
from trainer.options import EngineOptions
from trainer.watchdog import Watchdog

TRAIN = "train"
TRAIN_ACTIVE = "train-active"
ACTIVE = "active"
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


def train_active_step(scene: Scene) -> None:
    """One step of the engine in an active store, published to main as the trainer does it."""
    with scene.open_within(ACTIVE) as active, _tiers(active, scene.store) as tiers:
        tiers.seed()
        scene.receive(active, stage_step, lambda commit: _publish(tiers, commit))


def goes_on(root: str) -> list[str]:
    """What is wrong when both stores are opened again, and what is not published is.

    An active store that lost the record it was made with is refused, and there is nothing in it:
    it is made anew, as whoever trains does it.
    """
    with suppress(LogTruncatedError):
        return _goes_on(root)
    shutil.rmtree(os.path.join(root, ACTIVE))
    return _goes_on(root)


def _goes_on(root: str) -> list[str]:
    try:
        with (
            shardb.open(os.path.join(root, STORE), files=QUICK) as durable,
            shardb.open(os.path.join(root, ACTIVE), create=True, files=QUICK) as active,
            _tiers(active, durable) as tiers,
        ):
            tiers.seed()
            head = active.resolve()
            _publish(tiers, head)
            reached = durable.resolve()
    except LogTruncatedError:
        if not os.listdir(os.path.join(root, ACTIVE, "objects")):
            raise
        return ["the log of the active store was cut"]
    except ShardbError as error:
        return [f"training cannot go on ({error.kind}): {error}"]
    return [] if reached.id == head.id else [f"step {head.step} was not published"]


@contextmanager
def _tiers(active: shardb.Store, durable: shardb.Store) -> Iterator[TwoTiers]:
    watchdog = Watchdog(_say_nothing)
    try:
        tiers = TwoTiers(
            active,
            durable,
            "main",
            publishing=Publishing(every=1, copies=2),
            watchdog=watchdog,
            note=_say_nothing,
        )
        try:
            yield tiers
        finally:
            tiers.close()
    finally:
        watchdog.close()


def _publish(tiers: TwoTiers, commit: Commit) -> None:
    """Publish, and wait. An error may be of either store: it says little of the durable one."""
    try:
        tiers.keep(commit, ())
        tiers.finish(commit)
    except ShardbError as error:
        error.definite = False
        raise


def _say_nothing(_: str) -> None:
    pass


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
