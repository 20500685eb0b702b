"""Are norms, ranges and changes right, for every data type and beside what is no number?"""

from __future__ import annotations

import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shardb import comparing, layout
from shardb.comparing import Change, compare, tensor_numbers
from shardb.views import NUMPY_TYPES, TensorImage, specs_of


def image(**tensors: np.ndarray) -> TensorImage:
    """A shard in memory."""
    return stored({name: (None, array) for name, array in tensors.items()})


def stored(tensors: dict[str, tuple[str | None, np.ndarray]]) -> TensorImage:
    """A shard whose arrays hold the bytes of the data type that is named, by default their own."""
    specs = {}
    for name, (dtype, array) in tensors.items():
        own = layout.TensorSpec(dtype=dtype, shape=array.shape) if dtype else None
        specs[name] = own or specs_of({name: array})[name]
    placed = layout.build(specs)
    shard = TensorImage("s", placed, np.zeros(placed.size_bytes, dtype=np.uint8))
    for name, (_, array) in tensors.items():
        np.copyto(shard.array(name), array.view(NUMPY_TYPES[specs[name].dtype]))
    return shard


def test_are_norm_and_range_right() -> None:
    found = tensor_numbers(image(w=np.array([[3.0, -4.0], [0.0, 12.0]], dtype=np.float32)), "w")
    assert (found.dtype, found.shape, found.norm) == ("F32", (2, 2), 13.0)
    assert (found.minimum, found.maximum, found.nan_count, found.infinite_count) == (-4, 12, 0, 0)


def test_is_what_is_not_finite_counted_and_left_out() -> None:
    odd = np.array([3, math.nan, 4, math.inf, -math.inf, math.nan], dtype=np.float32)
    found = tensor_numbers(image(w=odd), "w")
    assert (found.norm, found.minimum, found.maximum) == (5.0, 3.0, 4.0)
    assert (found.nan_count, found.infinite_count) == (2, 2)
    none = tensor_numbers(image(w=np.array([math.nan])), "w")
    assert (none.norm, none.minimum, none.maximum) == (0.0, None, None)


def test_are_integers_exact_and_booleans_numbers() -> None:
    large = np.array([2**62 + 1, -5], dtype=np.int64)
    found = tensor_numbers(image(w=large), "w")
    assert (found.minimum, found.maximum) == (-5, 2**62 + 1)
    found = tensor_numbers(image(w=np.array([True, False, True])), "w")
    assert (found.minimum, found.maximum, found.norm) == (0, 1, math.sqrt(2))


def test_are_empty_scalar_and_complex_tensors_taken() -> None:
    assert tensor_numbers(image(w=np.zeros((0, 3), np.float32)), "w").minimum is None
    assert tensor_numbers(image(w=np.float32(2.5).reshape(())), "w").norm == 2.5
    found = tensor_numbers(image(w=np.array([3 + 4j], np.complex64)), "w")
    assert (found.norm, found.minimum) == (5.0, None)


@pytest.mark.parametrize(
    ("dtype", "kind"), [("F8_E4M3", "float8_e4m3fn"), ("F8_E5M2", "float8_e5m2")]
)
def test_has_every_eight_bit_float_its_value(dtype: str, kind: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(getattr(torch, kind)).double().numpy()
    np.testing.assert_array_equal(comparing._eight_bit_values(dtype), expected)
    assert tensor_numbers(stored({"w": (dtype, codes)}), "w").nan_count > 0


@given(hnp.arrays(np.float32, st.integers(1, 50), elements=st.floats(-1e3, 1e3, width=32)))
def test_are_short_floats_the_values_that_torch_sees(values: np.ndarray) -> None:
    for dtype, kind in (("BF16", torch.bfloat16), ("F16", torch.float16)):
        short = torch.from_numpy(values).to(kind)
        found = tensor_numbers(stored({"w": (dtype, short.view(torch.int16).numpy())}), "w")
        assert found.norm == pytest.approx(float(short.double().norm()), rel=1e-12)
        assert found.maximum == float(short.double().max())


def test_does_memory_not_grow_with_the_tensor(tmp_path: Path) -> None:
    big = image(w=np.ones(60 * comparing.BLOCK_ITEMS, dtype=np.float32))
    other = image(w=np.full(60 * comparing.BLOCK_ITEMS, 2, dtype=np.float32))
    tracemalloc.start()
    tensor_numbers(big, "w")
    assert compare(big, other).total.relative == 1.0
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 8 * 8 * comparing.BLOCK_ITEMS
    assert peak_bytes < big.bytes, "the control: one copy of the tensor would be more"


# Two versions of a shard


def test_is_the_relative_change_right_over_all_float_tensors() -> None:
    before = image(a=np.array([3.0, 4.0]), b=np.array([[0.0]], dtype=np.float32))
    after = image(a=np.array([3.0, 9.0]), b=np.array([[12.0]], dtype=np.float32))
    found = compare(before, after)
    assert found.floats["a"].relative == 1.0
    assert (found.floats["a"].changed, found.floats["a"].items) == (1, 2)
    assert found.floats["b"].relative == math.inf
    assert (found.total.norm, found.total.relative, found.total.largest) == (13.0, 2.6, 12.0)
    assert compare(before, before).total.relative == 0.0


def test_are_tensors_of_one_side_and_other_shapes_named() -> None:
    before = image(same=np.ones(2), gone=np.ones(2), wide=np.ones(2), kind=np.ones(2))
    after = image(same=np.ones(2), new=np.ones(2), wide=np.ones(3), kind=np.ones(2, np.float32))
    found = compare(before, after)
    assert (found.added, found.removed) == (("new",), ("gone",))
    assert sorted(found.reshaped) == ["kind", "wide"]
    assert list(found.floats) == ["same"]


def test_are_differing_integers_counted() -> None:
    before = image(n=np.arange(10), flag=np.array([True, False]))
    after = image(n=np.arange(10) // 5 * 5 + np.arange(10) % 4, flag=np.array([True, True]))
    found = compare(before, after)
    assert found.floats == {}
    assert found.integers == {
        "n": int((np.arange(10) != np.arange(10) // 5 * 5 + np.arange(10) % 4).sum()),
        "flag": 1,
    }
    assert found.total == Change()


def test_does_one_nan_not_hide_how_far_the_rest_moved() -> None:
    before = image(w=np.array([3.0, 4.0, 1.0, math.inf]))
    after = image(w=np.array([3.0, 9.0, math.nan, math.inf]))
    change = compare(before, after).total
    assert (change.nonfinite, change.relative) == (2, 1.0)


@settings(max_examples=40)
@given(
    hnp.arrays(np.float64, 30, elements=st.floats(-1e6, 1e6)),
    hnp.arrays(np.float64, 30, elements=st.floats(-1e6, 1e6)),
)
def test_do_blocks_give_what_the_whole_gives(one: np.ndarray, other: np.ndarray) -> None:
    whole = compare(image(w=one), image(w=other)).total
    assert whole.norm == pytest.approx(float(np.linalg.norm(other - one)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparing, "BLOCK_ITEMS", 7)
        pieces = compare(image(w=one), image(w=other)).total
    assert pieces.norm == pytest.approx(whole.norm)
    assert (pieces.items, pieces.changed, pieces.largest) == (
        whole.items,
        whole.changed,
        whole.largest,
    )
