"""The order in which rows are read: a pure function of (seed, position).

Owns the arithmetic and nothing else: no files, no numpy, no global random state, so the order is
the same on every machine, in every version of every library, and resuming needs no replay.

Position p counts rows since the beginning of training. Epoch e = p // rows in the set; every epoch
visits every row exactly once. Within an epoch the files are shuffled, gathered in groups of
`FILES_PER_GROUP`, and the rows of a group are permuted together. A set of up to that many files is
therefore shuffled as a whole, and a larger one keeps at most that many files in use at a time.

In sequential order each file is read from its first to its last row, and a shuffle buffer of so
many rows is filled, shuffled and emptied again and again: rows move by less than its size.

Formulas: `mix64` is the output function of SplitMix64 (Steele, Lea, Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014; constants of Stafford's variant 13). `permuted` is a
balanced Feistel network over the smallest even number of bits that holds the domain, with cycle
walking to stay inside it (Black, Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002): a
bijection in constant memory. `below` maps 64 random bits to a range by multiplication (Lemire,
"Fast random integer generation in an interval", 2019), without rejection: the bias is under 2**-40.

Changing any of this changes what a stored run would read next; `ORDER_VERSION` names the rule.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal, TypeAlias

ORDER_VERSION = 1
FILES_PER_GROUP = 16

FileRowCounts: TypeAlias = Sequence[int]
"""Rows in each file of the set, in the order of the files' names."""

RowOrder: TypeAlias = Literal["shuffled", "sequential"]
"""Rows of a file in permuted order, or file by file from the first to the last row."""

_MASK64 = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_FEISTEL_ROUNDS = 6


def mix64(value: int) -> int:
    """Scramble 64 bits (a bijection on [0, 2**64))."""
    value = (value + _GOLDEN_GAMMA) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def key_of(*parts: int) -> int:
    """Fold integers (taken modulo 2**64) into one 64-bit key; the order of the parts matters."""
    key = 0
    for part in parts:
        key = mix64(key ^ (part & _MASK64))
    return key


def below(bits: int, limit: int) -> int:
    """Map 64 uniform bits to [0, limit)."""
    return (bits * limit) >> 64


def permuted(index: int, size: int, key: int) -> int:
    """Send `index` to its place in the permutation of range(size) that `key` names."""
    if not 0 <= index < size:
        raise ValueError(f"index {index} is outside of range({size})")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    half_mask = (1 << half_bits) - 1
    place = index
    # The network permutes at most 4 * size values, so the walk comes back inside within as many.
    for _ in range(4 * size + 4):
        left, right = place >> half_bits, place & half_mask
        for round_number in range(_FEISTEL_ROUNDS):
            left, right = right, left ^ (key_of(key, round_number, right) & half_mask)
        place = left << half_bits | right
        if place < size:
            return place
    raise AssertionError("a bijection of a finite set returns to where it started")


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Files whose rows are permuted together; `ends` are cumulated row counts."""

    files: tuple[int, ...]
    ends: tuple[int, ...]
    key: int

    def locate(self, offset: int, *, row_order: RowOrder) -> tuple[int, int]:
        if row_order == "shuffled":
            offset = permuted(offset, self.ends[-1], self.key)
        slot = bisect_right(self.ends, offset)
        return self.files[slot], offset - (self.ends[slot - 1] if slot else 0)


@dataclass(frozen=True, kw_only=True)
class _EpochPlan:
    """The groups of one epoch, in the order they are read."""

    groups: tuple[_Group, ...]
    ends: tuple[int, ...]
    key: int = 0

    def locate(
        self, offset: int, *, row_order: RowOrder, shuffle_buffer_size: int = 0
    ) -> tuple[int, int]:
        if row_order == "sequential" and shuffle_buffer_size > 1:
            offset = self._out_of_buffer(offset, shuffle_buffer_size)
        slot = bisect_right(self.ends, offset)
        start = self.ends[slot - 1] if slot else 0
        return self.groups[slot].locate(offset - start, row_order=row_order)

    def _out_of_buffer(self, offset: int, size: int) -> int:
        """Shuffle rows among those that are in the buffer with them; an epoch's last are fewer."""
        filling, place = divmod(offset, size)
        start = filling * size
        held = min(size, self.ends[-1] - start)
        return start + permuted(place, held, key_of(self.key, filling, 2))


def _shuffled_files(file_count: int, key: int) -> list[int]:
    """Fisher-Yates, from the back."""
    files = list(range(file_count))
    for last in range(file_count - 1, 0, -1):
        other = below(key_of(key, last), last + 1)
        files[last], files[other] = files[other], files[last]
    return files


@lru_cache(maxsize=8)
def _epoch_plan(seed: int, epoch: int, row_counts: tuple[int, ...]) -> _EpochPlan:
    epoch_key = key_of(seed, epoch)
    files = _shuffled_files(len(row_counts), epoch_key)
    groups = []
    for start in range(0, len(files), FILES_PER_GROUP):
        members = tuple(files[start : start + FILES_PER_GROUP])
        ends = tuple(accumulate(row_counts[member] for member in members))
        groups.append(_Group(files=members, ends=ends, key=key_of(epoch_key, start, 1)))
    group_ends = tuple(accumulate(group.ends[-1] for group in groups))
    return _EpochPlan(groups=tuple(groups), ends=group_ends, key=epoch_key)


@lru_cache(maxsize=8)
def _plain_plan(row_counts: tuple[int, ...]) -> _EpochPlan:
    files = tuple(range(len(row_counts)))
    ends = tuple(accumulate(row_counts))
    return _EpochPlan(groups=(_Group(files=files, ends=ends, key=0),), ends=(ends[-1],))


def orders(
    seed: int,
    position: int,
    count: int,
    rows: FileRowCounts,
    *,
    shuffle: bool = True,
    row_order: RowOrder = "shuffled",
    shuffle_buffer_size: int = 0,
) -> Iterator[tuple[int, int]]:
    """Yield (file, row) for `count` positions from `position` on.

    shuffle_buffer_size: rows shuffled among themselves in sequential order; 0 or 1 shuffles none.

    Raises ValueError for a negative position, no files, or a file without rows.
    """
    row_counts = tuple(rows)
    if position < 0 or not row_counts or min(row_counts) < 1:
        raise ValueError(f"no order for position {position} over row counts {row_counts[:8]}")
    total = sum(row_counts)
    for at in range(position, position + count):
        epoch, offset = divmod(at, total)
        if shuffle:
            plan = _epoch_plan(seed, epoch, row_counts)
            yield plan.locate(offset, row_order=row_order, shuffle_buffer_size=shuffle_buffer_size)
        else:
            yield _plain_plan(row_counts).locate(offset, row_order="sequential")


def order(
    seed: int,
    position: int,
    rows: FileRowCounts,
    shuffle: bool = True,
    row_order: RowOrder = "shuffled",
    shuffle_buffer_size: int = 0,
) -> tuple[int, int]:
    """Return (file, row) of the row read at `position`."""
    found = orders(
        seed,
        position,
        1,
        rows,
        shuffle=shuffle,
        row_order=row_order,
        shuffle_buffer_size=shuffle_buffer_size,
    )
    return next(found)
