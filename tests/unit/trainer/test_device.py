"""Devices by name, and how bytes of a shard become tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shardb import TensorSpec, torch_adaptor
from tests.support.memory_transaction import MemoryStore
from trainer.device import ALIGNMENT_BYTES, Device
from trainer.errors import InputError

CPU = Device.from_name("cpu")


@pytest.mark.parametrize("name", ["gpu", "cpu:1x", "cuda:x", "cuda:-1", "mps", ""])
def test_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="choose cpu, cuda, cuda:N or auto"):
        Device.from_name(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_absent_cuda_is_refused_and_auto_falls_back() -> None:
    with pytest.raises(InputError, match="no CUDA device can be used here"):
        Device.from_name("cuda")
    assert Device.from_name("auto").name == "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_beyond_the_last_is_refused() -> None:
    with pytest.raises(InputError, match="numbered from 0"):
        Device.from_name("cuda:99")
    assert Device.from_name("auto").name == "cuda:0"


def view_of(**shapes: tuple[int, ...]):  # noqa: ANN201 - a view class of the store
    store = MemoryStore()
    txn = store.begin()
    staged = txn.stage("params/x", {n: TensorSpec(dtype="F32", shape=s) for n, s in shapes.items()})
    for index, tensor in enumerate(torch_adaptor.tensors(staged).values()):
        tensor.fill_(1.0 + index)
    staged.seal()
    txn.commit()
    return store.read("params/x")


def test_aligned_tensors_are_the_shards_own_memory() -> None:
    view = view_of(w=(8, 16))
    brought = CPU.bring_in(view, torch.float32)["w"]
    assert brought.data_ptr() == view.array("w").ctypes.data


def test_other_tensors_are_copied_to_an_aligned_place() -> None:
    view = view_of(first=(3, 3), second=(3,))
    brought = CPU.bring_in(view, torch.float32)
    assert view.array("second").ctypes.data % ALIGNMENT_BYTES != 0
    assert all(t.data_ptr() % ALIGNMENT_BYTES == 0 for t in brought.values())
    assert np.array_equal(brought["second"].numpy(), view.array("second"))


def test_another_dtype_is_derived_and_the_master_stays() -> None:
    view = view_of(w=(8, 16))
    assert CPU.bring_in(view, torch.bfloat16)["w"].dtype == torch.bfloat16
    assert CPU.bring_in(view, None)["w"].dtype == torch.float32


def test_a_limit_of_device_memory_binds_there_and_nothing_on_the_host() -> None:
    Device.from_name("cpu").limit_memory(1)
    assert torch.ones(1 << 16).sum() == 1 << 16
    if torch.cuda.is_available():
        device = Device.from_name("cuda")
        device.limit_memory(1 << 26)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 27, dtype=torch.uint8, device=device.torch_device)
        device.limit_memory(1 << 60)
