"""Does every tensor lie where its header says, in a file that depends on nothing else?"""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardb import layout
from shardb.errors import ObjectCorruptError, UsageError
from shardb.layout import ITEM_BITS, TensorSpec


def spec(dtype: str, *shape: int) -> TensorSpec:
    return TensorSpec(dtype=dtype, shape=shape)


SPECS = {
    "bias": spec("F32", 5),
    "weight": spec("F32", 7, 3),
    "table": spec("BF16", 100),
    "mask": spec("BOOL", 3),
    "step": spec("I64"),
    "empty": spec("F32", 0, 4),
}


def image(built: layout.Layout) -> bytes:
    return built.header + bytes(built.size_bytes - len(built.header))


def header_of(built: layout.Layout) -> dict[str, Any]:
    return dict(json.loads(built.header[8:]))


def test_does_data_start_on_a_page() -> None:
    built = layout.build(SPECS)
    assert len(built.header) % layout.DATA_ALIGNMENT_BYTES == 0
    assert int.from_bytes(built.header[:8], "little") == len(built.header) - 8
    assert min(built.offsets.values()) == len(built.header)


def test_are_tensors_in_order_of_item_size_bytes_and_name_without_holes() -> None:
    built = layout.build(SPECS)
    assert list(built.specs) == ["step", "weight", "bias", "empty", "table", "mask"]
    end = len(built.header)
    for name, tensor in built.specs.items():
        assert built.offsets[name] == end
        assert tensor.bytes == 0 or end % (ITEM_BITS[tensor.dtype] // 8) == 0
        end += tensor.bytes
    assert built.size_bytes == end


def test_is_the_layout_the_same_whatever_the_order_of_the_call() -> None:
    backwards = dict(reversed(SPECS.items()))
    assert layout.build(backwards).header == layout.build(SPECS).header


def test_does_a_layout_come_back_from_its_header() -> None:
    built = layout.build(SPECS)
    read = layout.parse(memoryview(image(built)), "object")
    assert dict(read.specs) == dict(built.specs)
    assert dict(read.offsets) == dict(built.offsets)
    assert (read.header, read.size_bytes) == (built.header, built.size_bytes)


def test_can_a_header_be_read_without_the_data() -> None:
    built = layout.build(SPECS)
    read = layout.parse_header(memoryview(built.header), built.size_bytes, "object")
    assert dict(read.offsets) == dict(built.offsets)


@pytest.mark.parametrize("dtype", sorted(ITEM_BITS))
def test_has_every_data_type_its_size(dtype: str) -> None:
    built = layout.build({"x": spec(dtype, 6)})
    assert built.size_bytes - len(built.header) == 6 * ITEM_BITS[dtype] // 8


def test_does_a_long_header_get_more_pages() -> None:
    built = layout.build(
        {f"tensor {number:04d} {'x' * 50}": spec("U8", 1) for number in range(200)}
    )
    assert len(built.header) > layout.DATA_ALIGNMENT_BYTES
    assert len(built.header) % layout.DATA_ALIGNMENT_BYTES == 0
    assert layout.parse(memoryview(image(built)), "object").specs == built.specs


def test_may_tensor_names_be_any_text() -> None:
    names = ["ü", "a/b", "x.y.z", '"quoted"', "\\", "\n", "日本", "__metadata", "a b"]
    built = layout.build({name: spec("U8", 1) for name in names})
    assert set(layout.parse(memoryview(image(built)), "object").specs) == set(names)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({}, "at least one tensor"),
        ({"x": spec("F13", 1)}, "data type 'F13' is unknown"),
        ({"x": spec("f32", 1)}, "data type 'f32' is unknown"),
        ({"x": spec("F32", -1)}, "shape"),
        ({"x": spec("F32", 1 << 63)}, "shape"),
        ({"x": spec("F32", *[1] * 33)}, "shape"),
        ({"x": TensorSpec(dtype="F32", shape=(2.0,))}, "shape"),  # type: ignore[arg-type]
        ({"x": TensorSpec(dtype="F32", shape=(True,))}, "shape"),
        ({"__metadata__": spec("F32", 1)}, "name of a tensor"),
        ({5: spec("F32", 1)}, "name of a tensor"),
        ({"\ud800": spec("F32", 1)}, "name of a tensor"),
    ],
)
def test_is_what_cannot_be_stored_refused(specs: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        layout.build(specs)


def test_is_a_header_refused_that_no_reader_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "HEADER_LIMIT_BYTES", 8192)
    assert layout.build({"x" * 3900: spec("U8", 1)})
    with pytest.raises(UsageError, match="use more shards"):
        layout.build({"x" * 4100: spec("U8", 1)})


@pytest.mark.parametrize(
    "name", ["a", "params/block_003", "v1.5-rc", "0", "a_b/c-d/e.f", "x" * 200]
)
def test_is_a_good_name_let_through(name: str) -> None:
    assert layout.check_name(name, "shard") is None


BAD_NAMES = [
    *("", "/a", "a/", "a//b", "..", "a..b", ".a", "-a", "a/.b", "a b", "ü", "a\n", "a\0"),
    *("x" * 201, "a@b", "a:b", "a\\b", "~"),
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_is_a_bad_name_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is not a valid name"):
        layout.check_name(name, "snapshot")


def test_is_a_file_refused_whose_data_was_cut() -> None:
    whole = image(layout.build(SPECS))
    for length in (0, 7, 8, 100, 4095, 4096, len(whole) - 1):
        with pytest.raises(ObjectCorruptError, match="object: not a valid safetensors file"):
            layout.parse(memoryview(whole[:length]), "object")
    with pytest.raises(ObjectCorruptError, match="tensors end at byte"):
        layout.parse(memoryview(whole + b"\0"), "object")


def test_is_the_header_checked_as_built() -> None:
    """The control arm of the hostile headers in tests/format: an honest one is let through."""
    built = layout.build({"x": spec("F32", 2)})
    entry = header_of(built)["x"]
    assert entry == {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    assert header_of(built)["__metadata__"] == layout.METADATA
