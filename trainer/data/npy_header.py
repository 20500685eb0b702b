"""The header of a token file: what is accepted, what is refused, and why.

Owns the rule "2-D, C order, little-endian integers of at most 32 bits" of the `.npy` format
(numpy.lib.format, versions 1.0 and 2.0). It reads headers only, never data, and never a pickle: the
header is a literal, and an object array is refused by its dtype before anything else is looked at.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from trainer.errors import InputError

_REMEDY = "write it again with `train-data prepare`"
_HEADER_BYTES = 128
_HEADER_TEXT_MAX = 10_000


@dataclass(frozen=True, kw_only=True)
class RowsHeader:
    """Shape, element type and place of the data of one checked file."""

    rows: int
    width: int
    dtype: np.dtype[Any]
    data_offset: int
    file_bytes: int


def header_bytes(*, rows: int, width: int, dtype: np.dtype[Any]) -> bytes:
    """Return a version 1.0 header of fixed length, so that it can be rewritten in place.

    numpy's own writer pads differently from version to version; equal data must be equal bytes.
    """
    kind = f"<{dtype.kind}{dtype.itemsize}"
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': ({rows}, {width}), }}"
    room = _HEADER_BYTES - 10
    assert len(text) < room, "two integers always fit"
    padded = text.encode("ascii").ljust(room - 1) + b"\n"
    return b"\x93NUMPY\x01\x00" + room.to_bytes(2, "little") + padded


def read_header(path: Path) -> RowsHeader:
    """Check one file's header against the rule and its size; InputError names file and reason."""
    if not path.is_file():
        raise InputError(f"{path}: not a regular file; move it away or {_REMEDY}")
    try:
        with path.open("rb") as file:
            file_bytes = path.stat().st_size
            if file_bytes == 0:
                raise InputError(f"{path}: the file is empty; {_REMEDY}")
            shape, fortran_order, dtype = _literal_header(file, path)
            data_offset = file.tell()
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); check its permissions and the disk"
        ) from error
    _refuse_dtype(dtype, path)
    _refuse_shape(shape, fortran_order, path)
    rows, width = shape
    _refuse_size(file_bytes - data_offset, rows, width, dtype, path)
    return RowsHeader(
        rows=rows, width=width, dtype=dtype, data_offset=data_offset, file_bytes=file_bytes
    )


def _literal_header(file: IO[bytes], path: Path) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            return np.lib.format.read_array_header_1_0(file, _HEADER_TEXT_MAX)
        if version == (2, 0):
            return np.lib.format.read_array_header_2_0(file, _HEADER_TEXT_MAX)
    # numpy evaluates the literal with ast: what a damaged one raises is not a closed set.
    except (ValueError, SyntaxError, TypeError, EOFError, MemoryError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{path}: not a .npy file ({reason}); {_REMEDY}") from error
    raise InputError(f"{path}: .npy version {version[0]}.{version[1]} is not read; {_REMEDY}")


def _refuse_dtype(dtype: np.dtype[Any], path: Path) -> None:
    reason = ""
    if dtype.hasobject:
        reason = "holds pickled Python objects, which are never loaded"
    elif dtype.kind not in "iu":
        reason = f"holds {dtype.name}, not integers"
    elif dtype.itemsize > 4:
        reason = f"holds {dtype.name}; token ids have at most 32 bits"
    elif dtype.itemsize > 1 and not _is_little_endian(dtype):
        reason = f"holds big-endian {dtype.name}; token ids are little-endian"
    if reason:
        raise InputError(f"{path}: {reason}; {_REMEDY}")


def _is_little_endian(dtype: np.dtype[Any]) -> bool:
    return dtype.byteorder == "<" or (dtype.byteorder == "=" and sys.byteorder == "little")


def _refuse_shape(shape: tuple[int, ...], fortran_order: bool, path: Path) -> None:
    reason = ""
    if len(shape) != 2:
        reason = f"has shape {shape}; token rows are 2-D: [rows, seq_len + 1]"
    elif fortran_order:
        reason = "is in Fortran order; token rows are in C order"
    elif shape[0] < 1:
        reason = "has no rows"
    elif shape[1] < 2:
        reason = f"has rows of {shape[1]} token; a row holds at least one token and its target"
    if reason:
        raise InputError(f"{path}: {reason}; {_REMEDY}")


def _refuse_size(found: int, rows: int, width: int, dtype: np.dtype[Any], path: Path) -> None:
    expected = rows * width * dtype.itemsize
    if found == expected:
        return
    what = f"truncated: {expected - found:,}" if found < expected else f"{found - expected:,}"
    tail = "bytes are missing" if found < expected else "bytes follow its last row"
    raise InputError(
        f"{path}: {what} {tail} (header: {rows:,} rows of {width:,} {dtype.name}, "
        f"{expected:,} bytes; found {found:,}); {_REMEDY}"
    )
