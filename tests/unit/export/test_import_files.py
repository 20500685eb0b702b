"""Is a package whose files cannot be trusted refused before anything is made of it?"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from export.import_files import open_package
from tests.support.packages import change_json, config_of, random_tensors, write_package
from trainer.errors import InputError

CONFIG = config_of("llama")
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = change(header)
    text = text if isinstance(text, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def refusal(package: Path) -> str:
    with pytest.raises(InputError) as refused:
        open_package(package)
    return str(refused.value)


def test_single_and_split_packages_hold_the_same(tmp_path: Path) -> None:
    single = open_package(write_package(tmp_path / "single", CONFIG))
    split = open_package(write_package(tmp_path / "split", CONFIG, split=True))
    assert {n: t.spec for n, t in single.tensors.items()} == {
        n: t.spec for n, t in split.tensors.items()
    }
    assert single.notes == split.notes == ()
    for name, tensor in random_tensors(CONFIG).items():
        for found in (single.tensors[name], split.tensors[name]):
            data = found.path.read_bytes()[found.offset : found.offset + found.spec.bytes]
            assert data == tensor.view(torch.uint8).numpy().tobytes()


def hostile_headers() -> dict[str, Callable[[dict[str, Any]], Any]]:
    first = "lm_head.weight"

    def entry(**values: Any) -> Callable[[dict[str, Any]], Any]:
        return lambda header: header[first].update(values)

    return {
        "offsets beyond the file": entry(data_offsets=[0, 1 << 50]),
        "offsets that overlap": lambda h: h[first].update(
            data_offsets=h["model.norm.weight"]["data_offsets"]
        ),
        "negative offsets": entry(data_offsets=[-8, 0]),
        "a shape that is not its bytes": entry(shape=[1 << 40, 1 << 40]),
        "a negative size": entry(shape=[-64, -32]),
        "a size that is no number": entry(shape=["64", 32]),
        "sizes without end": entry(shape=[2] * 100_000),
        "an unknown form": entry(dtype="Q4"),
        "no form": lambda h: h[first].pop("dtype"),
        "an entry that is no object": lambda h: h.update({first: 3}),
        "no object": lambda _: b"[1, 2]",
        "no JSON": lambda _: b"{" * 1000,
        "deep JSON": lambda _: b"[" * 200_000,
        "a name twice": lambda h: (
            json.dumps(h).encode()[:-1]
            + b', "lm_head.weight": '
            + json.dumps(h[first]).encode()
            + b"}"
        ),
    }


@pytest.mark.parametrize("case", hostile_headers())
def test_a_hostile_header_is_refused(case: str, tmp_path: Path) -> None:
    package = write_package(tmp_path / "p", CONFIG)
    path = package / "model.safetensors"
    rewrite_header(path, hostile_headers()[case])
    told = refusal(package)
    assert str(path) in told
    assert "fetch the file again" in told


@pytest.mark.parametrize("size", [0, 4, 8, 500, -1])
def test_a_truncated_file_is_refused(size: int, tmp_path: Path) -> None:
    package = write_package(tmp_path / "p", CONFIG)
    path = package / "model.safetensors"
    os.truncate(path, size if size >= 0 else path.stat().st_size - 1)
    assert str(path) in refusal(package)


def test_a_header_of_a_terabyte_takes_no_memory(tmp_path: Path) -> None:
    package = write_package(tmp_path / "p", CONFIG)
    path = package / "model.safetensors"
    path.write_bytes((1 << 40).to_bytes(8, "little") + path.read_bytes()[8:])
    assert "1099511627776" in refusal(package)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    package = write_package(tmp_path / "p", CONFIG, split=True)
    (package / TWO).unlink()
    told = refusal(package)
    assert TWO in told
    assert "1 of 2" in told


def test_a_stray_file_is_named(tmp_path: Path) -> None:
    package = write_package(tmp_path / "p", CONFIG, split=True)
    save_file({"x": torch.zeros(1)}, package / "model-00003-of-00003.safetensors")
    assert "model-00003-of-00003.safetensors" in refusal(package)
    (package / "model-00003-of-00003.safetensors").unlink()
    save_file({"x": torch.zeros(1)}, package / "consolidated.safetensors")
    assert open_package(package).notes == ()


def test_a_single_file_beside_an_index_is_refused(tmp_path: Path) -> None:
    package = write_package(tmp_path / "p", CONFIG, split=True)
    write_package(package, CONFIG)
    assert "both" in refusal(package)


def test_an_index_that_contradicts_its_files_is_refused(tmp_path: Path) -> None:
    def put(name: str, file: str) -> Callable[[Any], None]:
        return lambda index: index["weight_map"].update({name: file})

    package = write_package(tmp_path / "p", CONFIG, split=True)
    index = (package / INDEX).read_text()
    for change, words in (
        (put("ghost", ONE), ("ghost", ONE)),
        (put("lm_head.weight", TWO), ("lm_head.weight", TWO)),
        (lambda i: i["weight_map"].pop("lm_head.weight"), ("lm_head.weight", ONE)),
        (put("lm_head.weight", "../../etc/passwd"), ("../../etc/passwd",)),
        (put("lm_head.weight", ".."), ("'..'",)),
        (lambda i: i.pop("weight_map"), ("weight_map",)),
    ):
        (package / INDEX).write_text(index)
        change_json(package / INDEX, change)
        told = refusal(package)
        for word in words:
            assert word in told


def test_a_wrong_total_is_told(tmp_path: Path) -> None:
    package = write_package(tmp_path / "p", CONFIG, split=True)
    change_json(package / INDEX, lambda index: index["metadata"].update(total_size=5))
    assert "total_size is 5" in open_package(package).notes[0]


def test_pickles_and_nothing_are_refused(tmp_path: Path) -> None:
    assert "no such folder" in refusal(tmp_path / "none")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no model.safetensors" in refusal(empty)
    (empty / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    assert "never loaded" in refusal(empty)
    save_file({"x": torch.zeros(1)}, empty / "model-00001-of-00002.safetensors")
    assert "index is missing" in refusal(empty)


def test_an_index_that_is_no_json_is_refused(tmp_path: Path) -> None:
    package = write_package(tmp_path / "p", CONFIG, split=True)
    for text in ("[]", "{", "\x00"):
        (package / INDEX).write_text(text)
        assert INDEX in refusal(package)
