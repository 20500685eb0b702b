"""Is every token file that is not rows of small integers refused, with its name and the reason?"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from trainer.data.npy_header import header_bytes
from trainer.data.rows import OPEN_FILES_MAX, TokenRows, vocabulary_warning
from trainer.errors import InputError

Writer = Callable[[Path], None]


def rows_of(count: int = 4, width: int = 5, start: int = 0) -> np.ndarray[Any, Any]:
    return (np.arange(count * width) + start).reshape(count, width).astype(np.uint16)


def saved(array: np.ndarray[Any, Any]) -> Writer:
    return lambda path: np.save(path, array, allow_pickle=True)


def written(data: bytes) -> Writer:
    return lambda path: path.write_bytes(data) and None


def npy_bytes(array: np.ndarray[Any, Any], extra: bytes = b"", cut: int = 0) -> bytes:
    head = header_bytes(rows=array.shape[0], width=array.shape[1], dtype=array.dtype)
    data = head + array.tobytes() + extra
    return data[: len(data) - cut]


class Bomb:
    """Unpickling this would be seen."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("unpickled",)


GOOD = npy_bytes(rows_of())
REFUSED: dict[str, tuple[Writer, str]] = {
    "empty": (written(b""), "the file is empty"),
    "text": (written(b"not numbers at all\n" * 20), "not a .npy file"),
    "magic alone": (written(b"\x93NUMPY"), "not a .npy file"),
    "header cut": (written(GOOD[:60]), "not a .npy file"),
    "header damaged": (written(GOOD[:12] + b"\xff" + GOOD[13:]), "not a .npy file"),
    "version 3": (written(b"\x93NUMPY\x03\x00" + GOOD[8:]), "version 3.0 is not read"),
    "odd byte count": (written(npy_bytes(rows_of(), cut=1)), "truncated: 1 bytes are missing"),
    "half a row": (written(npy_bytes(rows_of(), cut=14)), "truncated: 14 bytes are missing"),
    "no data": (written(GOOD[:128]), "truncated: 40 bytes are missing"),
    "too long": (written(npy_bytes(rows_of(), extra=b"\0\0")), "2 bytes follow its last row"),
    "one dimension": (saved(np.arange(9, dtype=np.uint16)), "has shape (9,)"),
    "three dimensions": (saved(np.zeros((2, 2, 2), np.uint16)), "has shape (2, 2, 2)"),
    "zero rows": (saved(np.zeros((0, 5), np.uint16)), "has no rows"),
    "no target": (saved(np.zeros((5, 1), np.uint16)), "rows of 1 token"),
    "fortran": (saved(np.asfortranarray(rows_of())), "Fortran order"),
    "big-endian": (saved(rows_of().astype(">u2")), "big-endian"),
    "big-endian 32": (saved(rows_of().astype(">i4")), "big-endian"),
    "float": (saved(rows_of().astype(np.float32)), "float32, not integers"),
    "half": (saved(rows_of().astype(np.float16)), "float16, not integers"),
    "bool": (saved(rows_of() > 3), "bool, not integers"),
    "complex": (saved(rows_of().astype(np.complex64)), "complex64, not integers"),
    "text array": (saved(rows_of().astype("U4")), "not integers"),
    "date": (saved(rows_of().astype("datetime64[s]")), "not integers"),
    "structured": (saved(np.zeros((2, 3), [("a", "<u2"), ("b", "<u2")])), "not integers"),
    "int64": (saved(rows_of().astype(np.int64)), "int64; token ids have at most 32 bits"),
    "uint64": (saved(rows_of().astype(np.uint64)), "uint64; token ids have at most 32 bits"),
    "objects": (saved(np.array([[Bomb(), Bomb()]], dtype=object)), "pickled Python objects"),
    "bare pickle": (written(pickle.dumps(Bomb())), "not a .npy file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_a_file_that_holds_no_token_rows_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write, reason = REFUSED[name]
    folder = tmp_path / "train"
    folder.mkdir()
    np.save(folder / "a.npy", rows_of())
    write(folder / "b.npy")
    with pytest.raises(InputError) as caught:
        TokenRows.open(folder)
    assert str(caught.value).startswith(f"{folder / 'b.npy'}: ")
    assert reason in str(caught.value)
    assert "write it again" in str(caught.value)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "unpickled").exists()


def test_would_the_bomb_have_gone_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "b.npy", np.array([[Bomb(), Bomb()]], dtype=object), allow_pickle=True)
    with pytest.raises(FileExistsError):
        np.load(tmp_path / "b.npy", allow_pickle=True)
    assert (tmp_path / "unpickled").exists()


@pytest.mark.parametrize("dtype", ["u1", "i1", "<u2", "<i2", "<u4", "<i4"])
def test_is_every_small_integer_read(dtype: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", rows_of().astype(dtype))
    rows = TokenRows.open(tmp_path, vocab_size=20)
    assert rows.row(3).tolist() == [15, 16, 17, 18, 19]
    assert rows.row(3).dtype == np.int64
    assert rows.largest_id() == 19


def test_does_our_header_read_as_numpys_own(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(GOOD)
    loaded = np.load(tmp_path / "a.npy", allow_pickle=False)
    assert np.array_equal(loaded, rows_of())
    assert loaded.flags.c_contiguous


def test_are_no_directory_and_an_empty_one_told_apart(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    (tmp_path / "set" / "train").mkdir(parents=True)
    (tmp_path / "dirs" / "x.npy").mkdir(parents=True)
    reasons = {
        "missing": "no such directory",
        "empty": "the directory is empty",
        "file": "not a directory",
        "other": "holds no .npy files",
        "set": "did you mean",
        "dirs": "not a regular file",
    }
    for name, reason in reasons.items():
        with pytest.raises(InputError, match=reason) as caught:
            TokenRows.open(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)


def test_are_unequal_widths_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", rows_of(width=5))
    np.save(tmp_path / "b.npy", rows_of(width=6))
    with pytest.raises(InputError, match=r"b\.npy: rows of 6 tokens, but a\.npy has rows of 5"):
        TokenRows.open(tmp_path)


def test_is_the_vocabulary_that_a_refusal_asks_for_large_enough(tmp_path: Path) -> None:
    rows = rows_of()
    rows[1, 2], rows[2, 0] = 8000, 8123
    np.save(tmp_path / "a.npy", rows)
    with pytest.raises(InputError, match=r"token id 8,000, .* to at least 8,124$"):
        TokenRows.open(tmp_path, vocab_size=8000).largest_id()
    assert TokenRows.open(tmp_path, vocab_size=8124).largest_id() == 8123


def test_is_an_id_equal_to_the_vocabulary_found_in_the_last_row(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", rows_of())
    last = rows_of()
    last[3, 4] = 8000
    np.save(tmp_path / "b.npy", last)
    rows = TokenRows.open(tmp_path, vocab_size=8000)
    assert rows.row(6).max() == 14
    place = r"b\.npy: row 3, column 4 \(byte 166\) holds token id 8,000, but .* 8,000 ids"
    for read in (lambda: rows.row(7), rows.largest_id):
        with pytest.raises(InputError, match=place) as caught:
            read()
        remedy = "for a model that is begun anew and not imported, set --vocab-size to at least"
        assert str(caught.value).endswith(f"{remedy} 8,001")
    data = (tmp_path / "b.npy").read_bytes()
    assert int.from_bytes(data[166:168], "little") == 8000


def test_is_a_negative_id_refused(tmp_path: Path) -> None:
    bad = rows_of().astype(np.int32)
    bad[1, 2] = -1
    np.save(tmp_path / "a.npy", bad)
    rows = TokenRows.open(tmp_path)
    assert rows.row(0).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(InputError, match=r"row 1, column 2 .* negative token id -1"):
        rows.row(1)
    with pytest.raises(InputError, match="negative token id -1"):
        rows.largest_id()


def test_is_a_file_that_shrinks_in_use_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", rows_of(count=100))
    rows = TokenRows.open(tmp_path)
    assert rows.row(99)[0] == 495
    os.truncate(tmp_path / "a.npy", 300)
    with pytest.raises(InputError, match="changed while it was in use"):
        rows.row(99)


def test_is_a_file_replaced_before_it_is_read_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", rows_of(count=100))
    rows = TokenRows.open(tmp_path)
    np.save(tmp_path / "new.npy", rows_of(count=100, start=7))
    (tmp_path / "new.npy").rename(tmp_path / "a.npy")
    with pytest.raises(InputError, match="changed while it was in use"):
        rows.row(0)


def test_are_many_files_read_through_few_descriptors(tmp_path: Path) -> None:
    count = OPEN_FILES_MAX + 20
    for number in range(count):
        np.save(tmp_path / f"{number:03}.npy", rows_of(count=2, start=number))

    def open_files() -> int:
        links = [Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
        return sum(str(tmp_path) in os.readlink(link) for link in links if link.is_symlink())

    with TokenRows.open(tmp_path) as rows:
        assert [rows.row(2 * number)[0] for number in range(count)] == list(range(count))
        assert open_files() == OPEN_FILES_MAX
        assert rows.row(0)[0] == 0
    assert open_files() == 0


def test_is_the_largest_id_of_a_large_file_found(tmp_path: Path) -> None:
    values = np.zeros((70_000, 65), np.uint16)
    values[69_999, 64] = 65_535
    np.save(tmp_path / "a.npy", values)
    seen: list[tuple[int, int]] = []
    rows = TokenRows.open(tmp_path)
    assert rows.largest_id(lambda done, total: seen.append((done, total))) == 65_535
    assert len(seen) > 1
    assert seen[-1] == (values.nbytes + 128, values.nbytes + 128)


def test_does_the_digest_follow_content_and_names(tmp_path: Path) -> None:
    def digest(files: dict[str, np.ndarray[Any, Any]]) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, array in files.items():
            np.save(folder / name, array)
        return TokenRows.open(folder).digest()

    first = digest({"a.npy": rows_of(), "b.npy": rows_of(start=1)})
    assert first == digest({"a.npy": rows_of(), "b.npy": rows_of(start=1)})
    assert first != digest({"a.npy": rows_of(), "c.npy": rows_of(start=1)})
    assert first != digest({"a.npy": rows_of(), "b.npy": rows_of(start=2)})
    assert first != digest({"a.npy": rows_of()})
    assert first != digest({"a.npy": rows_of(start=1), "b.npy": rows_of()})


def test_is_a_far_too_large_vocabulary_warned_of(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", rows_of(start=7980))
    rows = TokenRows.open(tmp_path)
    warning = vocabulary_warning(rows, 32_000)
    assert warning is not None
    assert "32,000" in warning
    assert "8,000" in warning
    assert "75 %" in warning
    assert "--vocab-size 8000" in warning
    assert vocabulary_warning(rows, 8000) is None
    assert vocabulary_warning(rows, 15_999) is None


def test_is_no_size_advised_that_is_the_one_that_was_given() -> None:
    """A manifest tells that few ids are used, and that the last one is among them."""
    split = SimpleNamespace(distinct_ids=500)
    told = {"split": split, "is_described": lambda: True, "largest_id": lambda: 7999}
    spread = vocabulary_warning(cast(TokenRows, SimpleNamespace(**told)), 8000)
    assert spread is not None
    assert "--vocab-size" not in spread
    assert "never learned; prepare the data with a smaller vocabulary" in spread


def test_are_narrow_files_of_a_wide_vocabulary_warned_of(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[65_535, 1, 2]], np.uint16))
    warning = vocabulary_warning(TokenRows.open(tmp_path), 70_000)
    assert warning is not None
    assert "16-bit ids but the model has 70,000" in warning
    np.save(tmp_path / "a.npy", np.array([[65_535, 1, 2]], np.uint32))
    assert vocabulary_warning(TokenRows.open(tmp_path), 70_000) is None


def test_are_raw_files_cut_so_that_no_target_is_lost(tmp_path: Path) -> None:
    ids = np.arange(23, dtype="<u2")
    ids.tofile(tmp_path / "a.bin")
    rows = TokenRows.open_raw(tmp_path / "a.bin", dtype="uint16", seq_len=4, vocab_size=23)
    assert rows.row_count == 5
    assert [rows.row(index).tolist() for index in (0, 1, 4)] == [
        [0, 1, 2, 3, 4],
        [4, 5, 6, 7, 8],
        [16, 17, 18, 19, 20],
    ]
    targets = [target for index in range(5) for target in rows.row(index)[1:]]
    assert targets == list(range(1, 21))
    assert rows.largest_id() == 20


def test_does_a_folder_of_raw_files_tell_where_an_id_is(tmp_path: Path) -> None:
    np.arange(9, dtype="<u4").tofile(tmp_path / "a.bin")
    np.array([1, 2, 3, 70_000, 5], dtype="<u4").tofile(tmp_path / "b.bin")
    rows = TokenRows.open_raw(tmp_path, dtype="uint32", seq_len=2, vocab_size=100)
    assert rows.row_counts == (4, 2)
    with pytest.raises(InputError, match=r"b\.bin: row 1, column 1 \(byte 12\)"):
        rows.largest_id()


def test_is_a_raw_file_of_wider_ids_refused(tmp_path: Path) -> None:
    ids = np.arange(1, 101)
    ids.astype("<u4").tofile(tmp_path / "wide.bin")
    with pytest.raises(InputError, match=r"wide\.bin: every second id .* --data-dtype uint32"):
        TokenRows.open_raw(tmp_path / "wide.bin", dtype="uint16", seq_len=4)
    ids.astype("<u2").tofile(tmp_path / "right.bin")
    assert TokenRows.open_raw(tmp_path / "right.bin", dtype="uint16", seq_len=4).row_count == 24


def test_is_a_raw_file_of_narrower_ids_refused(tmp_path: Path) -> None:
    ids = np.arange(1, 401) * 100
    ids.astype("<u2").tofile(tmp_path / "narrow.bin")
    with pytest.raises(InputError, match=r"narrow\.bin: most ids .* --data-dtype uint16"):
        TokenRows.open_raw(tmp_path / "narrow.bin", dtype="uint32", seq_len=4, vocab_size=50_000)
    (ids * 10).astype("<u4").tofile(tmp_path / "right.bin")
    assert TokenRows.open_raw(tmp_path / "right.bin", dtype="uint32", seq_len=4).row_count == 99


def test_does_a_folder_of_the_other_form_say_how_to_read_it(tmp_path: Path) -> None:
    for name in ("raw", "rows", "neither"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("x")
    np.arange(23, dtype="<u2").tofile(tmp_path / "raw" / "a.bin")
    np.save(tmp_path / "rows" / "a.npy", rows_of())
    with pytest.raises(InputError, match=r"no \.npy files; .* --data-dtype .* and --seq-len"):
        TokenRows.open(tmp_path / "raw")
    with pytest.raises(InputError, match=r"no \.bin files; .* leave --data-dtype out"):
        TokenRows.open_raw(tmp_path / "rows", dtype="uint16", seq_len=4)
    with pytest.raises(InputError, match=r"no \.bin files; give the folder"):
        TokenRows.open_raw(tmp_path / "neither", dtype="uint16", seq_len=4)


def test_are_bad_raw_files_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"\0" * 21)
    (tmp_path / "short.bin").write_bytes(b"\0" * 8)
    (tmp_path / "none.bin").write_bytes(b"")
    reasons = [
        ("odd.bin", "uint16", 4, "no whole number of uint16 ids"),
        ("short.bin", "uint16", 4, "4 ids are less than one row of 5"),
        ("none.bin", "uint16", 4, "0 ids are less than one row"),
        ("odd.bin", "int64", 4, "give uint16 or uint32"),
        ("odd.bin", "uint16", 0, "seq_len 0 is below 1"),
        ("missing.bin", "uint16", 4, "no such directory"),
    ]
    for name, dtype, seq_len, reason in reasons:
        with pytest.raises(InputError, match=reason):
            TokenRows.open_raw(tmp_path / name, dtype=dtype, seq_len=seq_len)


def test_is_a_token_file_found_in_the_wild_read(shared_data: Path) -> None:
    path = shared_data / "tokenized" / "tinystories-gpt2-uint16.bin"
    rows = TokenRows.open_raw(path, dtype="uint16", seq_len=256, vocab_size=50_257)
    assert rows.row_count == (622_159 - 1) // 256
    assert rows.largest_id() == 50_256


def test_is_a_row_outside_of_the_set_an_index_error(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", rows_of())
    rows = TokenRows.open(tmp_path)
    with pytest.raises(IndexError):
        rows.row(4)
    with pytest.raises(IndexError):
        rows.row_of(0, -1)
