"""Is the data order a pure function of seed and position that visits every row once an epoch?"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.order import FILES_PER_GROUP, below, mix64, order, orders, permuted

COUNTS = st.lists(st.integers(1, 40), min_size=1, max_size=20)
SEEDS = st.integers(-(2**70), 2**70)
PINNED_SMALL = [(0, 2), (1, 2), (0, 3), (1, 1), (0, 4), (0, 0)]
PINNED_LARGE = [(21, 295), (6, 343), (13, 167), (20, 371), (37, 277)]


def slow_mix(value: int) -> int:
    """SplitMix64 as in the paper, on unbounded integers cut to 64 bits after every operation."""
    cut = 2**64
    z = (value + 11400714819323198485) % cut
    z = (z ^ z // 2**30) * 13787848793156543929 % cut
    z = (z ^ z // 2**27) * 10723151780598845931 % cut
    return z ^ z // 2**31


def slow_key(*parts: int) -> int:
    key = 0
    for part in parts:
        key = slow_mix(key ^ part % 2**64)
    return key


def slow_permutation(size: int, key: int) -> list[int]:
    """Tabulate the network over its whole power of four, then follow the table into range."""
    half = 2
    while half * half < size:
        half *= 2
    table = {}
    for value in range(half * half):
        left, right = divmod(value, half)
        for turn in range(6):
            left, right = right, left ^ slow_key(key, turn, right) % half
        table[value] = left * half + right
    assert sorted(table.values()) == list(range(half * half))
    places = []
    for index in range(size):
        place = table[index]
        while place >= size:
            place = table[place]
        places.append(place)
    return places


def slow_epoch(seed: int, epoch: int, counts: list[int]) -> list[tuple[int, int]]:
    """List a whole epoch: shuffle the files, then permute the rows of every sixteen files."""
    epoch_key = slow_key(seed, epoch)
    files = list(range(len(counts)))
    for last in reversed(range(1, len(files))):
        other = slow_key(epoch_key, last) * (last + 1) // 2**64
        files[last], files[other] = files[other], files[last]
    listed = []
    for start in range(0, len(files), 16):
        rows = [(file, row) for file in files[start : start + 16] for row in range(counts[file])]
        places = slow_permutation(len(rows), slow_key(epoch_key, start, 1))
        listed += [rows[place] for place in places]
    return listed


def test_does_the_mixer_give_the_published_values() -> None:
    # The first outputs of SplitMix64 seeded with 0 and with 1234567 (java.util.SplittableRandom).
    assert mix64(0) == 0xE220A8397B1DCDAF
    assert mix64(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4
    assert mix64(1234567) == 6457827717110365317


@settings(max_examples=40, deadline=None)
@given(counts=COUNTS, seed=SEEDS, epoch=st.integers(0, 3))
def test_does_the_order_equal_a_slow_reference(counts: list[int], seed: int, epoch: int) -> None:
    total = sum(counts)
    assert list(orders(seed, epoch * total, total, counts)) == slow_epoch(seed, epoch, counts)


def test_are_known_places_still_the_same() -> None:
    # Computed by `slow_epoch`; a change here changes what every stored run reads next.
    assert list(orders(7, 0, 6, [5, 3])) == slow_epoch(7, 0, [5, 3])[:6]
    assert list(orders(7, 0, 6, [5, 3])) == PINNED_SMALL
    assert [order(7, at, [1000] * 40) for at in (0, 1, 39_999, 40_000, 10**9)] == PINNED_LARGE


@settings(max_examples=60, deadline=None)
@given(counts=COUNTS, seed=SEEDS, epoch=st.integers(0, 5), sequential=st.booleans())
def test_does_an_epoch_visit_every_row_once(
    counts: list[int], seed: int, epoch: int, sequential: bool
) -> None:
    total = sum(counts)
    row_order = "sequential" if sequential else "shuffled"
    seen = Counter(orders(seed, epoch * total, total, counts, row_order=row_order))
    assert seen == Counter((file, row) for file, n in enumerate(counts) for row in range(n))


@settings(max_examples=60, deadline=None)
@given(counts=COUNTS, seed=SEEDS, position=st.integers(0, 5000), count=st.integers(1, 30))
def test_does_a_place_not_depend_on_what_was_read_before(
    counts: list[int], seed: int, position: int, count: int
) -> None:
    run = list(orders(seed, position, count, counts))
    assert run == [order(seed, at, counts) for at in range(position, position + count)]


@given(size=st.integers(1, 300), key=st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_is_the_permutation_one(size: int, key: int) -> None:
    places = [permuted(index, size, key) for index in range(size)]
    assert sorted(places) == list(range(size))
    assert places == slow_permutation(size, key)


def test_do_epochs_and_seeds_differ() -> None:
    counts = [400, 200]
    first = list(orders(1, 0, 600, counts))
    assert first != list(orders(1, 600, 600, counts))
    assert first != list(orders(2, 0, 600, counts))
    assert first != sorted(first)


def test_are_rows_of_different_files_mixed_well() -> None:
    counts = [5000, 5000]
    first_files = [file for file, _ in orders(3, 0, 2000, counts)]
    assert 900 < sum(first_files) < 1100


def test_is_a_permutation_without_visible_structure() -> None:
    size = 4096
    places = [permuted(index, size, 99) for index in range(size)]
    fixed = sum(place == index for index, place in enumerate(places))
    adjacent = sum(b - a == 1 for a, b in itertools.pairwise(places))
    # Both counts are about Poisson(1) for a random permutation.
    assert fixed < 10
    assert adjacent < 10


def test_is_the_plain_order_plain() -> None:
    plain = list(orders(5, 0, 6, [2, 1], shuffle=False))
    assert plain == [(0, 0), (0, 1), (1, 0)] * 2


def test_does_sequential_order_read_files_through() -> None:
    counts = [7] * 5
    files = [file for file, _ in orders(5, 0, 35, counts, row_order="sequential")]
    rows = [row for _, row in orders(5, 0, 35, counts, row_order="sequential")]
    assert rows == list(range(7)) * 5
    assert [files[at] for at in range(0, 35, 7)] != list(range(5))


@settings(max_examples=60, deadline=None)
@given(counts=COUNTS, seed=SEEDS, epoch=st.integers(0, 3), size=st.integers(0, 50))
def test_does_a_shuffle_buffer_equal_filling_and_shuffling_one(
    counts: list[int], seed: int, epoch: int, size: int
) -> None:
    total = sum(counts)
    in_order = list(orders(seed, epoch * total, total, counts, row_order="sequential"))
    expected: list[tuple[int, int]] = []
    for filling, start in enumerate(range(0, total, max(1, size))):
        held = in_order[start : start + max(1, size)]
        key = slow_key(slow_key(seed, epoch), filling, 2)
        expected += [held[place] for place in slow_permutation(len(held), key)]
    found = orders(
        seed, epoch * total, total, counts, row_order="sequential", shuffle_buffer_size=size
    )
    assert list(found) == expected
    assert sorted(expected) == sorted(in_order)


@settings(max_examples=60, deadline=None)
@given(counts=COUNTS, seed=SEEDS, position=st.integers(0, 5000), size=st.integers(2, 50))
def test_does_a_buffered_place_not_depend_on_what_was_read_before(
    counts: list[int], seed: int, position: int, size: int
) -> None:
    def at(position: int, count: int = 1) -> list[tuple[int, int]]:
        found = orders(
            seed, position, count, counts, row_order="sequential", shuffle_buffer_size=size
        )
        return list(found)

    assert at(position, 20) == [at(position + more)[0] for more in range(20)]


def test_does_a_shuffle_buffer_shuffle_and_keep_rows_near() -> None:
    found = [
        row for _, row in orders(3, 0, 4096, [4096], row_order="sequential", shuffle_buffer_size=64)
    ]
    moved = [abs(row - at) for at, row in enumerate(found)]
    assert max(moved) < 64
    assert sum(moved) / len(moved) > 16, "a third of the buffer, where it is shuffled well"


def test_does_a_buffer_change_nothing_where_rows_are_shuffled_already_or_not_at_all() -> None:
    for more in ({"row_order": "shuffled"}, {"shuffle": False}):
        plain = list(orders(3, 5, 30, [9, 8], **more))
        assert list(orders(3, 5, 30, [9, 8], shuffle_buffer_size=4, **more)) == plain


def test_are_few_files_in_use_at_a_time() -> None:
    counts = [10] * (3 * FILES_PER_GROUP)
    window = [file for file, _ in orders(1, 0, 10 * FILES_PER_GROUP, counts)]
    assert len(set(window)) == FILES_PER_GROUP


@pytest.mark.parametrize(("position", "counts"), [(-1, [3]), (0, []), (0, [3, 0]), (0, [-1])])
def test_is_an_order_over_nothing_refused(position: int, counts: list[int]) -> None:
    with pytest.raises(ValueError, match="no order"):
        order(0, position, counts)


def test_is_an_index_outside_of_the_permutation_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        permuted(3, 3, 0)


@given(bits=st.integers(0, 2**64 - 1), limit=st.integers(1, 2**40))
def test_does_a_bounded_number_stay_below_its_limit(bits: int, limit: int) -> None:
    assert 0 <= below(bits, limit) < limit
