"""Can any tool open an object, and are its bytes on disk those in memory?"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import xxhash

import shardb
from shardb.layout import DATA_ALIGNMENT_BYTES, ITEM_BITS, METADATA, TensorSpec
from shardb.views import NUMPY_TYPES, SPEC_TYPES
from tests.support.stores import MEDIA, Medium

safetensors = pytest.importorskip("safetensors")
from safetensors.numpy import load_file as load_numpy  # noqa: E402
from safetensors.torch import load_file as load_torch  # noqa: E402

TENSORS = {
    "weight": np.arange(24, dtype=np.float32).reshape(4, 6),
    "bias": np.linspace(-1, 1, 7, dtype=np.float64),
    "half": np.array([[1.5]], dtype=np.float16),
    "ids": np.array([1, 1 << 40], dtype=np.int64),
    "mask": np.array([True, False, True]),
    "scalar": np.array(3, dtype=np.int32),
    "empty": np.zeros((0, 3), dtype=np.float32),
}


@pytest.fixture(params=MEDIA)
def objects(tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, Path]:
    """The object files of one commit, by shard."""
    files = Medium(request.param)
    with (
        shardb.open(tmp_path / "run", create=True, files=files) as store,
        store.begin() as transaction,
    ):
        transaction.write("mixed", TENSORS)
        transaction.write("large", {"x": np.arange(300_001, dtype=np.float32)})
        every = {name: TensorSpec(dtype=name, shape=(3,)) for name in ITEM_BITS}
        staged = transaction.stage("every", every)
        for name in every:
            staged.array(name)[:] = np.ones(3, NUMPY_TYPES[name])
        commit = transaction.commit(step=1)
    folder = tmp_path / "run" / "objects"
    return {n: folder / f"{entry.digest}.safetensors" for n, entry in commit.shards.items()}


def test_does_the_safetensors_library_read_an_object(objects: dict[str, Path]) -> None:
    found = load_numpy(objects["mixed"])
    assert set(found) == set(TENSORS)
    for name, array in TENSORS.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert np.array_equal(found[name], array)
    assert np.array_equal(load_numpy(objects["large"])["x"], np.arange(300_001, dtype=np.float32))


def test_does_torch_read_every_data_type_of_an_object(objects: dict[str, Path]) -> None:
    found = load_torch(objects["every"])
    assert set(found) == set(ITEM_BITS)
    assert all(tuple(tensor.shape) == (3,) for tensor in found.values())
    assert found["BF16"].element_size() == 2


def test_has_an_object_the_metadata_that_loaders_want(objects: dict[str, Path]) -> None:
    with safetensors.safe_open(objects["mixed"], framework="numpy") as file:
        assert file.metadata() == METADATA
        assert METADATA["format"] == "pt"


def test_do_the_data_of_an_object_start_on_a_page(objects: dict[str, Path]) -> None:
    for path in objects.values():
        start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        assert start % DATA_ALIGNMENT_BYTES == 0


def test_is_an_object_named_by_the_digest_of_the_whole_file(objects: dict[str, Path]) -> None:
    for path in objects.values():
        assert path.stem == xxhash.xxh3_128_hexdigest(path.read_bytes())


def test_is_an_object_as_readable_as_any_new_file(objects: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    plain = (tmp_path / "plain").stat().st_mode
    assert {path.stat().st_mode for path in objects.values()} == {plain}
    assert os.access(objects["mixed"], os.R_OK)


def test_does_an_object_read_without_the_store_have_the_same_bytes(
    objects: dict[str, Path], tmp_path: Path
) -> None:
    with shardb.open(tmp_path / "run") as store, store.at() as view:
        for name, path in objects.items():
            assert view.read(name).image.tobytes() == path.read_bytes()
    assert set(SPEC_TYPES.values()) < set(ITEM_BITS)
