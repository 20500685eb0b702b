"""Does every id become a target exactly once, and is an id that does not fit refused?"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.packing import RowFileWriter, RowPacker, dtype_for, unigram_entropy
from trainer.data.rows import TokenRows
from trainer.errors import InputError


def packed(
    folder: Path, stream: list[int], *, seq_len: int, cuts: list[int], rows_per_file: int = 1000
) -> RowPacker:
    packer = RowPacker(
        folder,
        seq_len=seq_len,
        dtype=dtype_for(100),
        vocab_size=100,
        rows_per_file=rows_per_file,
    )
    at = 0
    for number in range(len(stream) + 1):
        size = cuts[number % len(cuts)]
        packer.add(np.array(stream[at : at + size], dtype=np.uint32))
        at += size
    return packer


@settings(max_examples=60, deadline=None)
@given(
    stream=st.lists(st.integers(0, 99), min_size=2, max_size=120),
    seq_len=st.integers(1, 9),
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    rows_per_file=st.integers(1, 7),
)
def test_are_the_targets_the_stream_without_its_first_id_and_its_tail(
    tmp_path_factory: pytest.TempPathFactory,
    stream: list[int],
    seq_len: int,
    cuts: list[int],
    rows_per_file: int,
) -> None:
    folder = tmp_path_factory.mktemp("pack") / "train"
    packer = packed(folder, stream, seq_len=seq_len, cuts=cuts, rows_per_file=rows_per_file)
    split = packer.finish(unknown_id=stream[0])
    assert split.rows == (len(stream) - 1) // seq_len
    assert split.tokens == len(stream)
    assert split.tokens - split.tokens_dropped == (split.rows * seq_len + 1 if split.rows else 0)
    assert split.unknown_tokens == stream.count(stream[0])
    assert split.distinct_ids == len(set(stream))
    if split.rows:
        check_rows(TokenRows.open(folder), stream, split, rows_per_file)


def check_rows(rows: TokenRows, stream: list[int], split: Any, rows_per_file: int) -> None:
    listed = [rows.row(index).tolist() for index in range(rows.row_count)]
    assert listed[0][0] == stream[0]
    assert [i for row in listed for i in row[1:]] == stream[1 : split.rows * rows.seq_len + 1]
    assert all(a[-1] == b[0] for a, b in itertools.pairwise(listed))
    assert all(count == rows_per_file for count in rows.row_counts[:-1])
    for entry, file in zip(split.files, rows.files, strict=True):
        data = file.path.read_bytes()
        assert (entry.name, entry.rows, entry.bytes) == (file.path.name, file.rows, len(data))
        assert entry.xxh3_128 == xxhash.xxh3_128_hexdigest(data)
        assert entry.largest_id == np.load(file.path).max()


@pytest.mark.parametrize(
    ("vocab_size", "name"),
    [
        (257, "uint16"),
        (65_535, "uint16"),
        (65_536, "uint16"),
        (65_537, "uint32"),
        (70_000, "uint32"),
    ],
)
def test_is_the_integer_type_chosen_by_the_largest_id(vocab_size: int, name: str) -> None:
    assert dtype_for(vocab_size).name == name
    assert np.iinfo(dtype_for(vocab_size)).max >= vocab_size - 1


def test_is_a_large_vocabulary_not_wrapped(tmp_path: Path) -> None:
    packer = RowPacker(tmp_path / "train", seq_len=2, dtype=dtype_for(70_000), vocab_size=70_000)
    packer.add(np.array([65_535, 65_536, 69_999], dtype=np.uint32))
    packer.finish(None)
    assert TokenRows.open(tmp_path / "train", 70_000).row(0).tolist() == [65_535, 65_536, 69_999]


def test_does_a_writer_refuse_what_its_type_cannot_hold(tmp_path: Path) -> None:
    writer = RowFileWriter(tmp_path / "a.npy", 2, np.dtype("<u2"))
    with pytest.raises(InputError, match=r"a\.npy: token id 65,536 does not fit into uint16"):
        writer.write(np.array([[1, 65_536]], dtype=np.uint32))
    with pytest.raises(InputError, match="token id -1 does not fit"):
        writer.write(np.array([[1, -1]], dtype=np.int64))
    writer.close()


def test_does_a_packer_refuse_an_id_beyond_the_vocabulary(tmp_path: Path) -> None:
    packer = RowPacker(tmp_path / "train", seq_len=2, dtype=np.dtype("<u2"), vocab_size=100)
    with pytest.raises(InputError, match="token id 100 is not below the vocabulary of 100"):
        packer.add(np.array([1, 100, 3], dtype=np.uint32))
    packer.close()


def test_are_files_little_endian_in_c_order(tmp_path: Path) -> None:
    packed(tmp_path / "train", [1, 2, 3, 4, 5], seq_len=2, cuts=[5]).finish(None)
    data = (tmp_path / "train" / "rows-00000.npy").read_bytes()
    assert data[128:] == b"\1\0\2\0\3\0\3\0\4\0\5\0"
    loaded = np.load(tmp_path / "train" / "rows-00000.npy", allow_pickle=False)
    assert loaded.tolist() == [[1, 2, 3], [3, 4, 5]]


def test_is_the_entropy_that_of_the_frequencies() -> None:
    assert unigram_entropy(np.array([5, 5, 0, 0])) == round(math.log(2), 4)
    assert unigram_entropy(np.array([7])) == 0.0
    assert unigram_entropy(np.array([0, 0])) == 0.0
