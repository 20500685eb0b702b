"""Do torch tensors and shards share memory, with every data type?"""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import shardb
from shardb.errors import UsageError
from shardb.layout import ITEM_BITS, TensorSpec

torch = pytest.importorskip("torch")
adaptor = pytest.importorskip("shardb.torch_adaptor")


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(
        torch.empty(tensor.shape, dtype=tensor.dtype)
        .copy_(tensor)
        .view(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )


def test_has_every_data_type_a_torch_type_of_its_size() -> None:
    assert set(adaptor.DTYPES) == set(ITEM_BITS)
    assert len(adaptor.NAMES) == len(adaptor.DTYPES)
    for name, dtype in adaptor.DTYPES.items():
        assert torch.empty(0, dtype=dtype).element_size() * 8 == ITEM_BITS[name]


@pytest.mark.parametrize("name", sorted(ITEM_BITS))
def test_does_a_tensor_of_every_type_come_back_bit_for_bit(store: shardb.Store, name: str) -> None:
    raw = torch.arange(6 * ITEM_BITS[name] // 8, dtype=torch.uint8) % 2
    tensor = raw.view(adaptor.DTYPES[name]).reshape(2, 3)
    with store.begin() as transaction:
        adaptor.write(transaction, "a", {"x": tensor, "one": tensor[0, 0], "none": tensor[:0]})
        transaction.commit(step=1)
    with store.at() as view:
        read = adaptor.tensors(view.read("a"))
        assert {n: (t.dtype, tuple(t.shape)) for n, t in read.items()} == {
            "x": (tensor.dtype, (2, 3)),
            "one": (tensor.dtype, ()),
            "none": (tensor.dtype, (0, 3)),
        }
        assert bits(read["x"]) == bits(tensor)
        assert bits(read["one"].reshape(1)) == bits(tensor[:1, 0])


def test_do_tensors_share_the_memory_of_the_shard(store: shardb.Store) -> None:
    with store.begin() as transaction, warnings.catch_warnings():
        warnings.simplefilter("error")
        staged = transaction.stage("a", {"x": TensorSpec(dtype="F32", shape=(4,))})
        adaptor.tensors(staged)["x"].fill_(3)
        assert np.all(staged.array("x") == 3)
        staged.seal()
        read = adaptor.tensors(transaction.read("a"))["x"]
        assert read.data_ptr() == transaction.read("a").array("x").ctypes.data


def test_is_a_tensor_written_whatever_its_strides_and_gradient(store: shardb.Store) -> None:
    source = torch.arange(12.0).reshape(3, 4).requires_grad_()
    with store.begin() as transaction:
        adaptor.write(transaction, "a", {"x": source.T, "y": source[:, ::2]}, trainable=False)
        commit = transaction.commit(step=1)
    assert not commit.shards["a"].trainable
    with store.at() as view:
        read = view.read("a")
        assert np.array_equal(read.array("x"), source.detach().numpy().T)
        assert np.array_equal(read.array("y"), source.detach().numpy()[:, ::2])


def test_are_specifications_those_of_the_tensors() -> None:
    named = {"x": torch.zeros(2, 3, dtype=torch.bfloat16), "y": torch.zeros((), dtype=torch.int64)}
    assert adaptor.specs(named) == {
        "x": TensorSpec(dtype="BF16", shape=(2, 3)),
        "y": TensorSpec(dtype="I64", shape=()),
    }


def test_is_a_type_that_cannot_be_stored_refused() -> None:
    with pytest.raises(UsageError, match="cannot be stored"):
        adaptor.specs({"x": torch.zeros(1, dtype=torch.complex128)})


def test_does_a_failed_copy_leave_nothing_staged(store: shardb.Store) -> None:
    """A half-filled image must not be sealed by a later commit."""
    with store.begin() as transaction:
        with pytest.raises((RuntimeError, NotImplementedError)):
            adaptor.write(transaction, "a", {"x": torch.zeros(4, device="meta")})
        assert transaction.names() == []
        adaptor.write(transaction, "a", {"x": torch.ones(4)})
        transaction.commit(step=1)
