"""Boundaries away from the device: do the same bits come back, and what does a full disk cost?"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from shardb.errors import StorageFullError
from shardb.filesystem import Buffer, FileSystem, RealFileSystem
from tests.support.memory_transaction import MemoryStore
from tests.support.tiny_model import TINY, micro_batches
from trainer.device import Device
from trainer.engine import Engine, EngineOptions
from trainer.errors import InputError
from trainer.page_locks import PageLocks
from trainer.placement import AwayBoundary, Put, Shelf
from trainer.placement_host import HostShelf
from trainer.placement_places import ActivationPlaces, boundary_bytes
from trainer.placement_spill import SpillFile, SpillShelf

CPU = Device.from_name("cpu")


class Training:
    """A tiny run whose boundaries lie on a shelf."""

    def __init__(self, shelf: Shelf | None, dtype: str = "fp32", clip: str = "global") -> None:
        options = EngineOptions(dtype=dtype, grad_clip_mode=clip, lm_head_chunk_tokens=16)
        self.engine = Engine(TINY, options, CPU)
        self.places = self.engine._model.places
        self.places._shelf = shelf
        self.places._file = shelf._file if isinstance(shelf, SpillShelf) else None
        self.store = MemoryStore()
        txn = self.store.begin()
        self.engine.initialise(txn, 7)
        txn.commit()

    def step(self, step: int) -> float:
        txn = self.store.begin()
        batches = micro_batches(step, 3)
        loss = self.engine.train_step(txn, batches, step=step, learning_rate=3e-3).loss
        txn.commit()
        return loss

    def result(self, steps: int = 3) -> tuple[list[float], dict[str, np.ndarray]]:
        losses = [self.step(step) for step in range(1, steps + 1)]
        held_out = self.engine.evaluate(self.store, micro_batches(99, 3)).loss
        return [*losses, held_out], self.store.arrays()


def equal(
    one: tuple[list[float], dict[str, np.ndarray]], other: tuple[list[float], dict[str, np.ndarray]]
) -> bool:
    return one[0] == other[0] and all(
        np.array_equal(one[1][name], other[1][name]) for name in one[1]
    )


class SwappedShelf(HostShelf):
    """Control: gives the first micro-batch for every other one of its stage."""

    first: Put | None = None

    def put(self, tensor: Tensor) -> Put:
        put = super().put(tensor)
        self.first = self.first or put
        return put

    def get(self, put: Put) -> Tensor:
        assert self.first is not None
        return super().get(self.first if self.first.shape == put.shape else put)


@pytest.mark.parametrize(("dtype", "clip"), [("fp32", "global"), ("bf16", "shard")])
@pytest.mark.parametrize("place", ["host", "spill"])
def test_every_place_gives_the_same_bits(place: str, dtype: str, clip: str, tmp_path: Path) -> None:
    shelf = HostShelf(CPU) if place == "host" else SpillShelf(CPU, SpillFile(str(tmp_path)))
    assert equal(Training(None, dtype, clip).result(), Training(shelf, dtype, clip).result())


def test_control_a_swapped_boundary_is_noticed() -> None:
    assert not equal(Training(None).result(1), Training(SwappedShelf(CPU)).result(1))


def test_places_are_used_again_and_the_file_has_no_name(tmp_path: Path) -> None:
    file = SpillFile(str(tmp_path))
    training = Training(SpillShelf(CPU, file))
    sizes = []
    for step in (1, 2, 3):
        training.step(step)
        assert os.listdir(tmp_path) == []
        sizes.append((file.size_bytes, file._end))
    # Three blocks, embeddings and norm, and one set of gradients: the sum is exact.
    needed = boundary_bytes(5, [3 * 20] * 3, 4 * TINY.hidden_size)
    assert sizes == [(needed, needed)] * 3
    file.close()
    assert file.size_bytes == 0


def test_without_unnamed_files_the_name_goes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.placement_spill.UNNAMED", 0)
    boundary = AwayBoundary(SpillShelf(CPU, SpillFile(str(tmp_path))))
    boundary.append(torch.arange(5.0))
    assert os.listdir(tmp_path) == []
    assert torch.equal(boundary[0], torch.arange(5.0))


class FullDisk(RealFileSystem):
    """Has no space as long as `full` names the operation that fails."""

    def __init__(self) -> None:
        self.full = ""

    def allocate(self, file: int, length: int, *, keep_size: bool) -> None:
        self._fail("allocate")
        super().allocate(file, length, keep_size=keep_size)

    def pwrite(self, file: int, data: Buffer, offset: int) -> int:
        self._fail("pwrite")
        return super().pwrite(file, data, offset)

    def _fail(self, operation: str) -> None:
        if self.full == operation:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("operation", ["allocate", "pwrite"])
def test_a_full_disk_names_the_remedy_and_the_step_is_not_lost(
    operation: str, tmp_path: Path
) -> None:
    files = FullDisk()
    training = Training(SpillShelf(CPU, SpillFile(str(tmp_path), files)))
    files.full = operation
    txn = training.store.begin()
    with pytest.raises(StorageFullError, match="--activation-placement host") as caught:
        training.engine.train_step(txn, micro_batches(1, 3), step=1, learning_rate=3e-3)
    assert caught.value.exit_code == 6
    assert str(tmp_path) in caught.value.message
    assert txn._staged == {}
    files.full = ""
    assert equal(Training(None).result(), training.result())


def test_a_file_system_that_cannot_take_space_ahead_is_used_all_the_same(tmp_path: Path) -> None:
    class NoAllocation(RealFileSystem):
        def allocate(self, file: int, length: int, *, keep_size: bool) -> None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    files: FileSystem = NoAllocation()
    training = Training(SpillShelf(CPU, SpillFile(str(tmp_path), files)))
    assert equal(Training(None).result(1), training.result(1))


def test_a_spill_without_a_folder_is_refused() -> None:
    options = EngineOptions(activation_placement="spill")
    with pytest.raises(InputError, match="--activation-placement"):
        ActivationPlaces(options, CPU)
    with pytest.raises(InputError, match="--activations recompute"):
        EngineOptions(activations="keep", activation_placement="host")
    assert ActivationPlaces(EngineOptions(activation_placement="host"), CPU)._shelf is None


def test_no_more_is_locked_than_the_budget_and_the_reason_is_told_once() -> None:
    locks = PageLocks(10_000)
    assert [locks.take(4096, "activations") for _ in range(4)] == [True, True, False, False]
    assert locks.locked_bytes == locks.locked_bytes_max == 8192
    [reason] = locks.reasons()
    assert "--pinned-budget" in reason
    assert locks.reasons() == []
    locks.give_back(4096)
    assert locks.take(4096, "activations")
    assert PageLocks(None).take(1 << 50, "everything")
