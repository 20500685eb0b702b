"""Numbers of tensors: norms, ranges, values that are no numbers, and how far two shards are apart.

Owns the arithmetic, block by block in float64, so that memory stays the same for tensors of any
size. Knows nothing of commits or stores. What is not finite is counted and left out of every norm:
one NaN must not hide how far the rest has moved.

The relative change is ||b - a|| / ||a|| over the float tensors that both have in the same shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardb.views import TensorImage

# In float64 it stays in the second cache of a core.
BLOCK_ITEMS = 1 << 16
FLOATS = frozenset(("F8_E4M3", "F8_E5M2", "F16", "BF16", "F32", "F64", "C64"))
Numbers = NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorNumbers:
    """What one tensor holds; minimum and maximum are None where it has no finite real number."""

    dtype: str
    shape: tuple[int, ...]
    norm: float
    minimum: float | int | None
    maximum: float | int | None
    nan_count: int
    infinite_count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """How far one tensor, or several together, moved.

    `largest` is the largest absolute change of one item, `nonfinite` how many items were left out.
    """

    items: int = 0
    changed: int = 0
    nonfinite: int = 0
    base_square: float = 0.0
    change_square: float = 0.0
    largest: float = 0.0

    @property
    def norm(self) -> float:
        """||b - a||."""
        return math.sqrt(self.change_square)

    @property
    def relative(self) -> float:
        """||b - a|| / ||a||; infinite where all of it was zero and is not any more."""
        if self.base_square:
            return math.sqrt(self.change_square) / math.sqrt(self.base_square)
        return math.inf if self.change_square else 0.0

    def __add__(self, other: Change) -> Change:
        return Change(
            items=self.items + other.items,
            changed=self.changed + other.changed,
            nonfinite=self.nonfinite + other.nonfinite,
            base_square=self.base_square + other.base_square,
            change_square=self.change_square + other.change_square,
            largest=max(self.largest, other.largest),
        )


@dataclass(frozen=True, kw_only=True)
class ShardDifference:
    """Two versions of a shard: tensors of one alone, of another shape, and how far the rest moved.

    `integers` says how many items differ of each tensor that holds no floats.
    """

    floats: dict[str, Change] = field(default_factory=dict)
    integers: dict[str, int] = field(default_factory=dict)
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()

    @property
    def total(self) -> Change:
        """All float tensors together."""
        return sum(self.floats.values(), Change())


def tensor_numbers(image: TensorImage, tensor: str) -> TensorNumbers:
    """Norm, range and counts of one tensor; NotFoundError when the shard has no such tensor."""
    spec = image.specs[tensor]
    square, nans, infinite = 0.0, 0, 0
    lowest: float | int = math.inf
    highest: float | int = -math.inf
    for stored in _blocks(image, tensor):
        block = finite = _as_numbers(stored, spec.dtype)
        part = _square(block)
        if not math.isfinite(part):
            known = np.isfinite(block)
            not_numbers = int(np.count_nonzero(np.isnan(block)))
            nans += not_numbers
            infinite += block.size - int(np.count_nonzero(known)) - not_numbers
            finite = block[known]
            part = _square(finite)
        square += part
        ordered = finite if spec.dtype in FLOATS else stored  # float64 rounds large integers
        if ordered.size and not np.iscomplexobj(ordered):
            lowest = min(lowest, ordered.min().item())
            highest = max(highest, ordered.max().item())
    return TensorNumbers(
        dtype=spec.dtype,
        shape=spec.shape,
        norm=math.sqrt(square),
        minimum=None if lowest > highest else lowest,
        maximum=None if lowest > highest else highest,
        nan_count=nans,
        infinite_count=infinite,
    )


def compare(before: TensorImage, after: TensorImage) -> ShardDifference:
    """How a shard changed from one version to another."""
    common = [name for name in before.specs if name in after.specs]
    same = [name for name in common if before.specs[name] == after.specs[name]]
    floats = {n for n in same if before.specs[n].dtype in FLOATS}
    return ShardDifference(
        floats={n: _change(before, after, n) for n in same if n in floats},
        integers={n: _differing(before, after, n) for n in same if n not in floats},
        added=tuple(name for name in after.specs if name not in before.specs),
        removed=tuple(name for name in before.specs if name not in after.specs),
        reshaped=tuple(name for name in common if name not in same),
    )


def _change(before: TensorImage, after: TensorImage, tensor: str) -> Change:
    total, dtype = Change(), before.specs[tensor].dtype
    for stored in zip(_blocks(before, tensor), _blocks(after, tensor), strict=True):
        one, other = (_as_numbers(block, dtype) for block in stored)
        with np.errstate(invalid="ignore", over="ignore"):
            moved = other - one
        base, change = one, moved
        base_square, change_square = _square(base), _square(change)
        left_out = 0
        if not (math.isfinite(base_square) and math.isfinite(change_square)):
            known = np.isfinite(one) & np.isfinite(other)
            left_out = one.size - int(np.count_nonzero(known))
            base, change = one[known], moved[known]
            base_square, change_square = _square(base), _square(change)
        total += Change(
            items=one.size,
            changed=int(np.count_nonzero(change)),
            nonfinite=left_out,
            base_square=base_square,
            change_square=change_square,
            largest=float(np.abs(change).max()) if change.size else 0.0,
        )
    return total


def _differing(before: TensorImage, after: TensorImage, tensor: str) -> int:
    pairs = zip(_blocks(before, tensor), _blocks(after, tensor), strict=True)
    return sum(int(np.count_nonzero(a != b)) for a, b in pairs)


def _square(block: Numbers) -> float:
    """The sum of squares; not finite when an item is not, or when float64 cannot hold it.

    Not a dot product: the library behind those starts threads that wait for each other by spinning,
    which beside a training run takes a hundred times as long.
    """
    other = block.conj() if np.iscomplexobj(block) else block
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.einsum("i,i->", other, block).real)


def _blocks(image: TensorImage, tensor: str) -> Iterator[Numbers]:
    """A tensor's items in order, as they are stored, a block at a time."""
    items = image.array(tensor).reshape(-1)
    for start in range(0, items.size, BLOCK_ITEMS):
        yield items[start : start + BLOCK_ITEMS]


def _as_numbers(stored: Numbers, dtype: str) -> Numbers:
    """Stored items as float64, or complex128."""
    if dtype == "BF16":
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype in ("F8_E4M3", "F8_E5M2"):
        return _eight_bit_values(dtype)[stored]
    return stored.astype(np.complex128 if dtype == "C64" else np.float64)


@cache
def _eight_bit_values(dtype: str) -> NDArray[np.float64]:
    """The value of each byte (https://arxiv.org/abs/2209.05433, table 1)."""
    mantissa_bits, bias = (3, 7) if dtype == "F8_E4M3" else (2, 15)
    codes = np.arange(256)
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent = (codes & 0x7F) >> mantissa_bits
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    values = np.where(
        exponent == 0,
        mantissa * 2.0 ** (1 - bias),
        (1 + mantissa) * 2.0 ** (exponent.astype(np.float64) - bias),
    )
    if dtype == "F8_E4M3":
        values[(codes & 0x7F) == 0x7F] = np.nan  # it has no infinity
    else:
        values[exponent == 31] = np.where(mantissa[exponent == 31] == 0, np.inf, np.nan)
    return np.asarray(sign * values)
