"""Do views share memory, and keep what is immutable immutable?"""

from __future__ import annotations

import numpy as np
import pytest

import shardb
from shardb import layout
from shardb.errors import NotFoundError, UsageError
from shardb.layout import ITEM_BITS, TensorSpec
from shardb.views import NUMPY_TYPES, SPEC_TYPES, ShardView, StagedShard, specs_of


def image_of(specs: dict[str, TensorSpec]) -> tuple[layout.Layout, np.ndarray]:
    built = layout.build(specs)
    image = np.zeros(built.size_bytes, dtype=np.uint8)
    image[len(built.header) :] = np.arange(built.size_bytes - len(built.header)) % 251
    return built, image


def test_has_every_data_type_a_numpy_type_of_its_size() -> None:
    assert set(NUMPY_TYPES) == set(ITEM_BITS)
    for name, numpy_type in NUMPY_TYPES.items():
        assert np.dtype(numpy_type).itemsize * 8 == ITEM_BITS[name]
        assert np.dtype(numpy_type).byteorder in "|=<"


@pytest.mark.parametrize("dtype", sorted(SPEC_TYPES))
def test_does_a_numpy_type_come_back(dtype: str) -> None:
    spec = specs_of({"x": np.zeros(3, dtype=dtype)})["x"]
    assert np.dtype(NUMPY_TYPES[spec.dtype]) == np.dtype(dtype)


def test_do_arrays_share_the_image_and_have_their_shape() -> None:
    built, image = image_of(
        {"m": TensorSpec(dtype="F32", shape=(2, 3)), "v": TensorSpec(dtype="U8", shape=(5,))}
    )
    view = ShardView("params/a", built, image, "digest")
    array = view.array("m")
    assert array.shape == (2, 3)
    assert np.shares_memory(array, image)
    assert array.tobytes() == image[view.layout.offsets["m"] :][:24].tobytes()
    assert list(view.arrays()) == list(view.specs) == ["m", "v"]
    assert (view.name, view.digest, view.bytes) == ("params/a", "digest", len(image))


def test_have_scalars_and_empty_tensors_arrays() -> None:
    built, image = image_of(
        {"s": TensorSpec(dtype="I64", shape=()), "e": TensorSpec(dtype="F32", shape=(0, 3))}
    )
    view = ShardView("a", built, image, None)
    assert view.array("s").shape == ()
    assert view.array("e").shape == (0, 3)


def test_is_a_tensor_that_is_not_there_named() -> None:
    built, image = image_of({"weight": TensorSpec(dtype="F32", shape=(1,))})
    expected = "shard 'a': there is no tensor 'wieght'; did you mean weight"
    with pytest.raises(NotFoundError, match=expected):
        ShardView("a", built, image, None).array("wieght")


def test_is_an_image_of_another_size_our_own_mistake() -> None:
    built, image = image_of({"weight": TensorSpec(dtype="F32", shape=(1,))})
    with pytest.raises(AssertionError):
        ShardView("a", built, image[:-1], None)


@pytest.mark.parametrize("dtype", [object, "S3", "U3", "M8[s]", np.longdouble, complex])
def test_is_a_numpy_type_that_cannot_be_stored_refused(dtype: object) -> None:
    with pytest.raises(UsageError, match="tensor 'x'"):
        specs_of({"x": np.zeros(2, dtype=dtype)})  # type: ignore[call-overload]


def test_is_an_image_sealed_once() -> None:
    built, image = image_of({"weight": TensorSpec(dtype="F32", shape=(1,))})
    sealed: list[StagedShard] = []
    staged = StagedShard("a", built, image, sealed.append)
    staged.seal()
    staged.seal()
    assert sealed == [staged]


def test_are_views_of_a_commit_read_only_and_of_a_staged_shard_writable(
    store: shardb.Store,
) -> None:
    with store.begin() as transaction:
        staged = transaction.stage("a", {"x": TensorSpec(dtype="F32", shape=(4,))})
        staged.array("x")[:] = 5
        staged.seal()
        with pytest.raises(ValueError, match="read-only"):
            staged.array("x")[:] = 6
        with pytest.raises(ValueError, match="read-only"):
            transaction.read("a").array("x")[:] = 6
        transaction.commit(step=1)
    with store.at() as view, pytest.raises(ValueError, match="read-only"):
        view.read("a").array("x")[:] = 6
