"""Repack a set of token rows: tens of thousands of small files into few large ones.

Rows keep their order, ids and number; only the files change. A folder of many files costs an open
descriptor and a seek for every few rows, and a shuffle by groups of files mixes little when each
file is small. Reads `.npy` rows, or raw `.bin` ids with an explicit type and row length.

Usage: python -m tools.repack_tokens SOURCE OUT [--rows-per-file 65536]
       python -m tools.repack_tokens SOURCE OUT --raw-dtype uint16 --seq-len 512
Exit codes: 0 fine, 2 bad input, 5 OUT is there already. An interrupt leaves nothing under OUT.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardb.errors import ConflictError, ShardbError
from trainer.data.packing import ROWS_PER_FILE, RowFileWriter, dtype_for
from trainer.data.progress import NoProgress, PrepareProgress, TextProgress
from trainer.data.publish import partial_directory
from trainer.data.rows import TokenRows

BLOCK_ROWS = 1024
Ids = npt.NDArray[np.int64]


def repack(
    rows: TokenRows, out: Path, *, rows_per_file: int, progress: PrepareProgress
) -> list[Path]:
    """Write every row of `rows`, in order, into files under `out`; give their paths.

    Raises ConflictError when `out` is there, InputError for rows that cannot be read.
    """
    if os.path.lexists(out):
        raise ConflictError(f"{out}: there already; give another OUT, or move it away")
    target = out.resolve()
    dtype = dtype_for(rows.largest_id() + 1)
    width = rows.seq_len + 1
    names: list[str] = []
    progress.begin("repacking", rows.row_count * width * dtype.itemsize)
    with partial_directory(target) as partial:
        writer: RowFileWriter | None = None
        try:
            for block in _blocks(rows, rows_per_file):
                if writer is None:
                    names.append(f"rows-{len(names):05d}.npy")
                    writer = RowFileWriter(partial.path / names[-1], width, dtype)
                writer.write(block)
                progress.advance(block.size * dtype.itemsize)
                if writer.rows == rows_per_file:
                    writer.finish()
                    writer = None
            if writer is not None:
                writer.finish()
                writer = None
        finally:
            if writer is not None:
                writer.close()
        partial.publish()
    progress.end()
    return [target / name for name in names]


def _blocks(rows: TokenRows, rows_per_file: int) -> Iterator[Ids]:
    """Give rows in order, in blocks that never span two target files."""
    block: list[Ids] = []
    written = 0
    for file, count in enumerate(rows.row_counts):
        for row in range(count):
            block.append(rows.row_of(file, row))
            if len(block) == min(BLOCK_ROWS, rows_per_file - written % rows_per_file):
                yield np.stack(block)
                written += len(block)
                block = []
    if block:
        yield np.stack(block)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; give its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="folder of token files")
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--rows-per-file", type=int, default=ROWS_PER_FILE)
    parser.add_argument("--raw-dtype", choices=("uint16", "uint32"), help="SOURCE is raw .bin ids")
    parser.add_argument("--seq-len", type=int, help="tokens of a row, with --raw-dtype")
    given = parser.parse_args(arguments)
    if given.rows_per_file < 1:
        parser.error("--rows-per-file: give 1 or more")
    if (given.raw_dtype is None) != (given.seq_len is None):
        parser.error("--raw-dtype and --seq-len go together")
    progress = TextProgress(sys.stderr) if sys.stderr is not None else NoProgress()
    try:
        with _open(given) as rows:
            paths = repack(rows, given.out, rows_per_file=given.rows_per_file, progress=progress)
            print(f"{given.out}: {rows.row_count:,} rows of {rows.seq_len} + 1 tokens")
            print(f"from {len(rows.files):,} files into {len(paths):,}")
    except ShardbError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _open(given: argparse.Namespace) -> TokenRows:
    if given.raw_dtype is None:
        return TokenRows.open(given.source)
    return TokenRows.open_raw(given.source, dtype=given.raw_dtype, seq_len=given.seq_len)


if __name__ == "__main__":
    sys.exit(main())
