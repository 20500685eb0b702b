"""Is every malformed safetensors header refused, quickly and without memory?"""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import Any

import pytest

from shardb import layout
from shardb.errors import ObjectCorruptError

GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def parsed(header: bytes, data_bytes: int = 8, length: int | None = None) -> layout.Layout:
    told = len(header) if length is None else length
    whole = told.to_bytes(8, "little") + header + bytes(data_bytes)
    return layout.parse(memoryview(whole), "object")


def with_entry(**changes: Any) -> bytes:
    return json.dumps({"x": {**GOOD, **changes}}).encode()


def test_is_an_honest_header_let_through() -> None:
    assert parsed(with_entry()).specs["x"].shape == (2,)
    assert parsed(with_entry() + b" " * 30).specs["x"].shape == (2,)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"5",
        b'"x"',
        b"{} {}",
        b"\xff\xfe",
        b"\x00" * 40,
        json.dumps({"x": GOOD}).encode("utf-16"),
        json.dumps({"x": GOOD}).encode("utf-32"),
        b'{"x": 5}',
        b'{"x": []}',
        b'{"x": "text"}',
        b'{"x": null}',
        b'{"x": {}}',
        b'{"x": ' * 100_000,
        b"[" * 200_000,
        b'{"x": ' + b"9" * 5000 + b"}",
    ],
)
def test_is_a_header_that_is_no_table_of_tensors_refused(header: bytes) -> None:
    with pytest.raises(ObjectCorruptError, match="not a valid safetensors file"):
        parsed(header)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "F31"},
        {"dtype": None},
        {"dtype": ["F32"]},
        {"dtype": 4},
        {"shape": None},
        {"shape": 2},
        {"shape": "2"},
        {"shape": [2.0]},
        {"shape": [True, 2]},
        {"shape": ["2"]},
        {"shape": [-2]},
        {"shape": [-1, -2]},
        {"shape": [3]},
        {"shape": [1]},
        {"shape": [[2]]},
        {"shape": [1] * 40 + [2]},
        {"shape": [1 << 64, 0]},
        {"data_offsets": None},
        {"data_offsets": []},
        {"data_offsets": [0]},
        {"data_offsets": [0, 8, 16]},
        {"data_offsets": [8, 0]},
        {"data_offsets": [1, 9]},
        {"data_offsets": [-8, 0]},
        {"data_offsets": [0, 16]},
        {"data_offsets": [0.0, 8.0]},
        {"data_offsets": ["0", "8"]},
        {"data_offsets": {"0": 8}},
        {"data_offsets": [False, 8]},
    ],
)
def test_is_a_malformed_entry_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ObjectCorruptError, match="not a valid safetensors file"):
        parsed(with_entry(**changes))


@pytest.mark.parametrize(
    "entries",
    [
        {"x": GOOD, "y": GOOD},
        {"x": GOOD, "y": {**GOOD, "data_offsets": [4, 12]}},
        {"x": GOOD, "y": {**GOOD, "data_offsets": [12, 20]}},
        {"x": {**GOOD, "data_offsets": [8, 16]}},
    ],
    ids=["the same place", "overlap", "hole", "hole at the start"],
)
def test_are_tensors_refused_that_do_not_follow_each_other(entries: dict[str, Any]) -> None:
    with pytest.raises(ObjectCorruptError, match="does not lie"):
        parsed(json.dumps(entries).encode(), data_bytes=24)


@pytest.mark.parametrize("length", [9, 1 << 20, 100_000_001, (1 << 63) - 1, (1 << 64) - 1])
def test_is_a_header_length_refused_that_the_file_has_not(length: int) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ObjectCorruptError, match="the header says it has"):
            parsed(b"{}", data_bytes=0, length=length)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_is_a_shape_refused_whose_product_would_never_end() -> None:
    sizes = ",".join(["9" * 4000] * 5000)
    before = time.monotonic()
    with pytest.raises(ObjectCorruptError, match="not a valid safetensors file"):
        parsed(
            b'{"x": {"dtype": "F32", "data_offsets": [0, 8], "shape": [' + sizes.encode() + b"]}}"
        )
    assert time.monotonic() - before < 10
