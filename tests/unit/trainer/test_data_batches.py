"""Does a batch depend on data, seed and position alone, so that a resumed run skips nothing?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.batches import batch_at, batch_digest, validation_batches
from trainer.data.rows import TokenRows
from trainer.errors import InputError

WIDTH = 5


def numbered(folder: Path, counts: list[int]) -> TokenRows:
    """Make files whose rows are told apart by their first id."""
    folder.mkdir()
    first = 0
    for number, count in enumerate(counts):
        array = np.full((count, WIDTH), 60_000, np.uint16)
        array[:, 0] = np.arange(first, first + count)
        np.save(folder / f"{number:02}.npy", array)
        first += count
    return TokenRows.open(folder, vocab_size=65_536)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> TokenRows:
    return numbered(tmp_path_factory.mktemp("batches") / "rows", [11, 7, 5])


def test_is_a_batch_of_the_shape_and_type_that_the_engine_takes(rows: TokenRows) -> None:
    batch = batch_at(rows, seed=1, position=0, batch_rows=4)
    assert batch.shape == (4, WIDTH)
    assert batch.dtype == np.int64
    assert batch.flags.c_contiguous


def test_does_an_epoch_hold_every_row_and_the_batch_at_its_end_go_on(rows: TokenRows) -> None:
    seen = [batch_at(rows, seed=3, position=at, batch_rows=10)[:, 0] for at in range(0, 50, 10)]
    flat = np.concatenate(seen).tolist()
    assert sorted(flat[:23]) == list(range(23))
    assert sorted(flat[23:46]) == list(range(23))
    assert flat[:23] != flat[23:46]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**63),
    position=st.integers(0, 500),
    batch_rows=st.integers(1, 9),
    steps=st.integers(2, 6),
    cut=st.integers(1, 5),
)
def test_does_a_resumed_run_read_what_an_unbroken_one_reads(
    rows: TokenRows, seed: int, position: int, batch_rows: int, steps: int, cut: int
) -> None:
    def digests(start: int, count: int) -> list[str]:
        positions = range(start, start + count * batch_rows, batch_rows)
        return [
            batch_digest(batch_at(rows, seed=seed, position=at, batch_rows=batch_rows))
            for at in positions
        ]

    done = min(cut, steps)
    unbroken = digests(position, steps)
    resumed = digests(position, done) + digests(position + done * batch_rows, steps - done)
    assert resumed == unbroken


def test_would_replayed_or_skipped_rows_be_seen(rows: TokenRows) -> None:
    straight = batch_digest(batch_at(rows, seed=1, position=4, batch_rows=4))
    assert straight != batch_digest(batch_at(rows, seed=1, position=3, batch_rows=4))
    assert straight != batch_digest(batch_at(rows, seed=1, position=5, batch_rows=4))
    assert straight != batch_digest(batch_at(rows, seed=2, position=4, batch_rows=4))


def test_is_the_split_into_micro_batches_of_no_consequence(rows: TokenRows) -> None:
    whole = batch_at(rows, seed=9, position=17, batch_rows=12)
    parts = [batch_at(rows, seed=9, position=17 + at, batch_rows=3) for at in (0, 3, 6, 9)]
    assert np.array_equal(whole, np.concatenate(parts))


def test_is_a_batch_without_shuffling_in_file_order(rows: TokenRows) -> None:
    batch = batch_at(rows, seed=9, position=9, batch_rows=5, shuffle=False)
    assert batch[:, 0].tolist() == [9, 10, 11, 12, 13]


def test_is_a_bad_id_refused_before_the_batch_exists(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[1, 2, 3], [4, 300, 6]], np.uint16))
    small = TokenRows.open(tmp_path, vocab_size=300)
    with pytest.raises(InputError, match=r"a\.npy: row 1, column 1 .* token id 300"):
        batch_at(small, seed=0, position=0, batch_rows=2)


def test_is_the_validation_set_read_once_in_order_to_its_last_row(rows: TokenRows) -> None:
    batches = list(validation_batches(rows, 10))
    assert [len(batch) for batch in batches] == [10, 10, 3]
    assert np.concatenate(batches)[:, 0].tolist() == list(range(23))
    assert batch_digest(batches[0]) == batch_digest(next(validation_batches(rows, 10)))


@pytest.mark.parametrize(("limit", "sizes"), [(0, []), (1, [10]), (2, [10, 10]), (9, [10, 10, 3])])
def test_is_the_number_of_validation_batches_bounded(
    rows: TokenRows, limit: int, sizes: list[int]
) -> None:
    assert [len(batch) for batch in validation_batches(rows, 10, limit)] == sizes


def test_is_a_batch_of_no_rows_refused(rows: TokenRows) -> None:
    with pytest.raises(ValueError, match="at least one row"):
        batch_at(rows, seed=0, position=0, batch_rows=0)
    with pytest.raises(ValueError, match="at least one row"):
        next(validation_batches(rows, 0))


def test_is_a_digest_that_of_the_ids_and_not_of_their_type(rows: TokenRows) -> None:
    batch = batch_at(rows, seed=1, position=0, batch_rows=4)
    assert batch_digest(batch) == batch_digest(batch.astype(np.int32))  # type: ignore[arg-type]
    assert batch_digest(batch) == batch_digest(np.asfortranarray(batch))
    assert batch_digest(batch) != batch_digest(batch.reshape(2, -1))
    assert batch_digest(batch) != batch_digest(batch[::-1])
