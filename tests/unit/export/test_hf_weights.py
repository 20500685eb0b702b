"""Are weights written as the store has them, in files that any reader opens?"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file

from export.average import TILE_ELEMENTS, mean_of
from export.hf_weights import check_values, index_of, split_into_files, write_weights
from export.package_tensors import native_tensors
from export.package_weights import open_weights
from tests.support.exports import make_store, params_of, replace_weight
from tests.support.tiny_model import TINY, TINY_TIED
from trainer.errors import InputError


def test_is_every_tensor_there_once_with_its_bytes(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", TINY)
    tensors = native_tensors(TINY, "llama", "F32")
    files = split_into_files(tensors, 40_000)
    assert len(files) > 3
    with open_weights(str(store), ref=None) as weights:
        written = write_weights(weights, files, tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.bytes for tensor in tensors)
    params = params_of(store)
    found = {}
    for file in files:
        for name, values in load_file(tmp_path / file.name).items():
            assert index["weight_map"][name] == file.name
            assert name not in found
            found[name] = values
    for tensor in tensors:
        values = params[tensor.shard][tensor.tensor]
        assert torch.equal(found[tensor.name], values)
        digest = xxhash.xxh3_128_hexdigest(values.numpy().tobytes())
        assert written.tensor_digests[tensor.name] == digest
    assert set(found) == {tensor.name for tensor in tensors}


def test_is_the_header_what_readers_need(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", TINY_TIED)
    [file] = split_into_files(native_tensors(TINY_TIED, "llama", "BF16"), 1 << 30)
    with open_weights(str(store), ref=None) as weights:
        write_weights(weights, [file], tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert "lm_head.weight" not in header
    assert (8 + size) % 64 == 0
    ends = sorted(entry["data_offsets"] for entry in header.values())
    assert ends[0][0] == 0
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ends))
    assert ends[-1][1] == len(data) - 8 - size
    assert not (tmp_path / "model.safetensors.index.json").exists()


def test_is_a_tensor_larger_than_the_limit_alone_in_its_file() -> None:
    tensors = native_tensors(TINY, "llama", "F32")
    files = split_into_files(tensors, 1)
    assert len(files) == len(tensors)
    assert json.loads(index_of(files))["weight_map"][tensors[0].name] == files[0].name


@pytest.mark.parametrize(
    ("value", "dtype", "words"),
    [
        (70000.0, "F16", "70000, and float16 ends at 65504: export with --dtype bf16 or fp32"),
        (65505.0, "F16", "65504"),
        (float("inf"), "F32", "not finite"),
        (float("nan"), "BF16", "not finite"),
    ],
)
def test_is_a_weight_that_does_not_fit_refused_by_name(
    value: float, dtype: str, words: str, tmp_path: Path
) -> None:
    store = make_store(tmp_path / "store", TINY)
    replace_weight(store, "block_001", "mlp.up_proj.weight", value)
    with open_weights(str(store), ref=None) as weights:
        with pytest.raises(InputError, match=words) as error:
            check_values(weights, native_tensors(TINY, "llama", dtype))
        assert "params/block_001: tensor mlp.up_proj.weight" in str(error.value)
    with open_weights(str(store), ref="step-0") as weights:  # control: the commit before is fine
        assert check_values(weights, native_tensors(TINY, "llama", dtype)).elements > 0


def test_are_weights_that_become_zero_counted(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", TINY)
    replace_weight(store, "block_001", "mlp.up_proj.weight", 1e-9)
    with open_weights(str(store), ref=None) as weights:
        losses = {
            dtype: check_values(weights, native_tensors(TINY, "llama", dtype)).to_zero
            for dtype in ("F32", "BF16", "F16")
        }
    assert losses == {"F32": 0, "BF16": 0, "F16": 1}


def test_is_the_mean_that_of_numpy(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", TINY, steps=3)
    refs = ("step-0", "step-1", "step-2")
    each = [params_of(store, ref) for ref in refs]
    with open_weights(str(store), ref=None, average=refs) as weights:
        for shard, tensors in each[0].items():
            mean = weights.read(shard)
            for name in tensors:
                stack = np.stack([params[shard][name].numpy() for params in each])
                expected = stack.mean(axis=0, dtype=np.float64).astype(np.float32)
                assert mean[name].numpy().tobytes() == expected.tobytes()
        assert len(weights.objects("params/block_000")) == 3


def test_is_a_mean_taken_in_fp64_over_all_tiles() -> None:
    values = [torch.full((TILE_ELEMENTS + 3,), v) for v in (1e8, 1.0, -1e8)]
    assert torch.equal(mean_of(values), torch.full((TILE_ELEMENTS + 3,), 1.0 / 3.0))
    assert float((values[0] + values[1] + values[2])[0] / 3) != pytest.approx(1 / 3)  # control


def test_is_a_mean_of_nothing_sensible_refused(tmp_path: Path) -> None:
    store = str(make_store(tmp_path / "store", TINY, steps=2))
    for average, ref, words in (
        (("step-0",), None, "two commits"),
        (("step-0", "step-1"), "step-0", "leave out --ref"),
    ):
        with pytest.raises(InputError, match=words), open_weights(store, ref=ref, average=average):
            pass


def test_is_a_bf16_store_exported_exactly(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", replace(TINY, num_layers=1), dtype="BF16")
    files = split_into_files(native_tensors(replace(TINY, num_layers=1), "llama", "F32"), 1 << 30)
    with open_weights(str(store), ref=None) as weights:
        write_weights(weights, files, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    stored = params_of(store)["params/embeddings"]["weight"]
    assert torch.equal(found["model.embed_tokens.weight"], stored.float())
