"""One file of token rows: found, checked before use, and its ids checked when they are read.

Owns where an id lies in a file and every reason to refuse a file, a set of files or an id.
It does not keep files open and does not know which rows are wanted (`rows`).

Shapes: L = seq_len; a row has L + 1 ids. In `.npy` files rows lie side by side; in raw `.bin` files
row r holds ids [r * L, r * L + L + 1), so neighbours share one id.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.manifest import SplitEntry
from trainer.data.npy_header import read_header
from trainer.errors import InputError

# Of a raw file, so many ids are looked at to see whether its type was named rightly.
WIDTH_SAMPLE_IDS = 4096
WIDTH_SAMPLE_IDS_MIN = 64
# No vocabulary is so large: the half of an id's bits that is the next id reaches it at once.
NO_VOCABULARY_IDS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class RowFile:
    """One checked file. `stride` is the distance of two rows in ids: L + 1, or L in raw files."""

    path: Path
    rows: int
    width: int
    stride: int
    dtype: np.dtype[Any]
    data_offset: int
    file_bytes: int
    identity: tuple[int, int, int, int]

    def offset(self, row: int, column: int = 0) -> int:
        """Return the byte offset of one id."""
        return self.data_offset + (row * self.stride + column) * self.dtype.itemsize


def check_ids(
    rows: npt.NDArray[Any], source: RowFile, *, first_row: int, vocab_size: int | None
) -> None:
    """Refuse ids that are negative or not below `vocab_size`: InputError names row and offset.

    `rows` [R, L + 1] are the rows `first_row`, `first_row + 1`, ... of `source`.
    """
    limit = vocab_size if vocab_size is not None else 1 << 32
    if int(rows.max()) < limit and (rows.dtype.kind == "u" or int(rows.min()) >= 0):
        return
    wide = rows.astype(np.int64)
    row, column = (int(part) for part in np.argwhere((wide < 0) | (wide >= limit))[0])
    token_id = int(wide[row, column])
    offset = source.offset(first_row + row, column)
    where = f"{source.path}: row {first_row + row:,}, column {column:,} (byte {offset:,})"
    if token_id < 0:
        raise InputError(
            f"{where} holds the negative token id {token_id}; the file is damaged or was not "
            "written as token ids: prepare the data again"
        )
    needed = int(wide.max()) + 1
    raise InputError(
        f"{where} holds token id {token_id:,}, but the vocabulary has {limit:,} ids "
        f"(0 to {limit - 1:,}); prepare the data with the model's tokenizer, or, for a model that "
        f"is begun anew and not imported, set --vocab-size to at least {needed:,}"
    )


def file_names(folder: Path, suffix: str) -> list[str]:
    """Return the names of a folder's token files, sorted; refuse when there is none."""
    if not folder.exists():
        raise InputError(f"{folder}: no such directory; make it with `train-data prepare`")
    if not folder.is_dir():
        raise InputError(f"{folder}: not a directory; give the folder that holds the token files")
    try:
        entries = sorted(os.listdir(folder))
    except OSError as error:
        raise InputError(f"{folder}: cannot be listed ({error.strerror})") from error
    names = [name for name in entries if name.endswith(suffix) and not name.startswith(".")]
    if names:
        return names
    if not entries:
        raise InputError(f"{folder}: the directory is empty; fill it with `train-data prepare`")
    if (folder / "train").is_dir():
        raise InputError(f"{folder}: holds no {suffix} files; did you mean {folder / 'train'}?")
    raise InputError(f"{folder}: holds no {suffix} files; {_remedy_for_none(entries, suffix)}")


def _remedy_for_none(entries: list[str], suffix: str) -> str:
    """Say how to read what lies in a folder, or how to make what does not."""
    if suffix == ".npy" and any(name.endswith(".bin") for name in entries):
        return "to read its .bin files give --data-dtype (uint16 or uint32) and --seq-len"
    if suffix == ".npy":
        return "make them with `train-data prepare`"
    if any(name.endswith(".npy") for name in entries):
        return "to read its .npy files leave --data-dtype out (in a run that had it: give npy)"
    return f"give the folder that holds headerless {suffix} files of token ids"


def npy_file(path: Path) -> RowFile:
    """Check one `.npy` file; InputError names the file, the reason and the remedy."""
    header = read_header(path)
    return RowFile(
        path=path,
        rows=header.rows,
        width=header.width,
        stride=header.width,
        dtype=header.dtype,
        data_offset=header.data_offset,
        file_bytes=header.file_bytes,
        identity=identity_of(path.stat()),
    )


def raw_file(path: Path, dtype: np.dtype[Any], seq_len: int) -> RowFile:
    """Cut a headerless file of ids into rows that share one id with the next."""
    status = path.stat()
    ids, odd_bytes = divmod(status.st_size, dtype.itemsize)
    if odd_bytes:
        raise InputError(
            f"{path}: {status.st_size:,} bytes are no whole number of {dtype.name} ids; "
            "the file is truncated or of another dtype"
        )
    rows = (ids - 1) // seq_len
    if rows < 1:
        raise InputError(
            f"{path}: {ids:,} ids are less than one row of {seq_len + 1:,}; "
            "give a smaller --seq-len or a longer file"
        )
    _refuse_other_width(path, dtype)
    return RowFile(
        path=path,
        rows=rows,
        width=seq_len + 1,
        stride=seq_len,
        dtype=dtype,
        data_offset=0,
        file_bytes=status.st_size,
        identity=identity_of(status),
    )


def _refuse_other_width(path: Path, dtype: np.dtype[Any]) -> None:
    """Refuse a file of uint32 that is read as uint16, in which every second id would be 0 in
    silence, and one of uint16 read as uint32, which seems to need an absurd vocabulary."""
    ids = np.fromfile(path, dtype=dtype, count=WIDTH_SAMPLE_IDS)
    if ids.size < WIDTH_SAMPLE_IDS_MIN:
        return
    first = f"of the first {ids.size:,}"
    if dtype.itemsize == 2 and ids[::2].any() and not ids[1::2].any():
        raise InputError(
            f"{path}: every second id {first} is 0, as in a file of uint32 that"
            " is read as uint16: give --data-dtype uint32"
        )
    if dtype.itemsize == 4 and 2 * int((ids >= NO_VOCABULARY_IDS).sum()) > ids.size:
        raise InputError(
            f"{path}: most ids {first} are {NO_VOCABULARY_IDS:,} or more, as in a file of uint16"
            " that is read as uint32: give --data-dtype uint16"
        )


def refuse_unequal_widths(files: tuple[RowFile, ...]) -> None:
    """Refuse a folder that mixes row lengths."""
    for file in files:
        if file.width != files[0].width:
            raise InputError(
                f"{file.path}: rows of {file.width:,} tokens, but {files[0].path.name} has rows of "
                f"{files[0].width:,}; one folder holds rows of one length: prepare the data again"
            )


def refuse_missing(folder: Path, names: list[str], split: SplitEntry) -> None:
    """Refuse a folder that lacks a file of its manifest: a half-copied set trains on less."""
    for entry in split.files:
        if entry.name not in names:
            raise InputError(
                f"{folder / entry.name}: listed in the manifest but not there; copy the missing "
                "file or prepare the data again"
            )


def identity_of(status: os.stat_result) -> tuple[int, int, int, int]:
    """Return what changes when a file is replaced, cut or rewritten."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def changed_error(source: RowFile) -> InputError:
    """Return the error for a file that is no longer the one that was checked."""
    return InputError(
        f"{source.path}: the file changed while it was in use; restore it, or start again with "
        "the new data in another folder"
    )
