"""The data of a run, opened and checked before anything of the run exists.

Owns which checks are made of training and validation rows and of the tokenizer that was prepared
with them. Knows nothing of stores. Invariant: validation data is only ever what was given as such.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash
from tokenizers import Tokenizer

from trainer.data.manifest import TOKENIZER_NAME, file_digest, find_manifest
from trainer.data.rows import TokenRows, vocabulary_warning
from trainer.errors import InputError
from trainer.model.config import ModelConfig

# Up to this size every byte of a set is read at the start: about a second. Of larger sets the
# manifest is believed, and each row is still checked when it is read.
READ_ALL_BYTES = 1 << 30
RAW_DTYPES = ("uint16", "uint32")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Opened data: `tokenizer` holds the bytes of a tokenizer.json, if one was prepared."""

    rows: TokenRows
    validation_rows: TokenRows | None
    data_digest: str
    tokenizer: bytes | None
    notes: tuple[str, ...]


def end_of_text_id(data_dir: str) -> int | None:
    """Give the id that ends a document in prepared data, if a manifest tells it."""
    described = find_manifest(Path(data_dir).absolute())
    return described[0].end_of_text_id if described else None


def open_inputs(
    data_dir: str,
    val_data_dir: str | None,
    *,
    vocab_size: int,
    seq_len: int | None,
    data_dtype: str = "npy",
    warns_of_vocabulary: bool = True,
) -> Inputs:
    """Open and check everything that training will read; InputError names the file and the fix.

    `warns_of_vocabulary`: say so when the data uses little of the model's vocabulary; an imported
    model knows the rest already.
    `seq_len` is the length the rows must have, None to take what they have; `data_dtype` is "npy",
    or that of raw files, which are cut into rows of `seq_len`.
    """
    rows = _open_rows(data_dir, vocab_size, data_dtype, seq_len)
    if seq_len is not None and rows.seq_len != seq_len:
        raise InputError(
            f"{data_dir}: its rows hold {rows.seq_len} tokens, but --seq-len is {seq_len}: leave"
            " the flag out, or prepare rows of that length"
        )
    _check_contents(rows)
    notes = []
    if _is_small(rows) or rows.is_described():
        note = _vocabulary_note(rows)
        notes += [note] if warns_of_vocabulary else []
    validation_rows = None
    if val_data_dir is None:
        notes.append("no --val-data-dir: this run is not validated")
    else:
        validation_rows = _open_rows(val_data_dir, vocab_size, data_dtype, seq_len)
        _check_validation(rows, validation_rows, notes)
    return Inputs(
        rows=rows,
        validation_rows=validation_rows,
        data_digest=rows.digest(),
        tokenizer=_tokenizer(rows, data_dir),
        notes=tuple(note for note in notes if note),
    )


def check_beside_import(
    inputs: Inputs, model: ModelConfig, tokenizer: bytes | None, *, accepts_other: bool
) -> list[str]:
    """Refuse rows that an imported model cannot mean; give what is to be known of them.

    tokenizer: the imported tokenizer.json, if there is one; `accepts_other`: rows of another one
    may be trained on.
    """
    rows = inputs.rows
    if rows.seq_len > model.max_position_embeddings:
        raise InputError(
            f"{rows.directory}: its rows hold {rows.seq_len} tokens, more than the"
            f" {model.max_position_embeddings} positions of the imported model: prepare shorter"
            " rows with --seq-len"
        )
    told = _other_tokenizer(inputs, tokenizer)
    if told is None:
        return []
    if accepts_other or inputs.tokenizer is None:
        return [f"warning: {told}"]
    raise InputError(
        f"{told}: prepare them with the tokenizer.json of the package, or give"
        " --accept-other-tokenizer to train on them all the same"
    )


def _other_tokenizer(inputs: Inputs, of_model: bytes | None) -> str | None:
    """Say that rows were made with other words than a model knows; None where none are known."""
    rows, of_data = inputs.rows, inputs.tokenizer
    if of_model is None:
        return None
    if of_data is None:
        if rows.manifest and rows.manifest.tokenizer_xxh3_128 != _digest(of_model):
            return (
                f"{rows.directory}: the tokenizer.json that its rows were made with is gone, and it"
                " was not the file that was imported: whether ids mean the same words is not known"
            )
        return None
    if of_data == of_model or _vocabulary(of_data) == _vocabulary(of_model):
        return None
    return (
        f"{rows.directory}: its rows were made with another tokenizer than the imported model's, so"
        " its ids mean other words"
    )


def _digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def _vocabulary(tokenizer: bytes) -> dict[str, int]:
    return Tokenizer.from_str(tokenizer.decode()).get_vocab(with_added_tokens=True)


def _open_rows(data_dir: str, vocab_size: int, data_dtype: str, seq_len: int | None) -> TokenRows:
    if data_dtype == "npy":
        return TokenRows.open(data_dir, vocab_size)
    if data_dtype not in RAW_DTYPES:
        choices = ", ".join(("npy", *RAW_DTYPES))
        raise InputError(f"--data-dtype is {data_dtype!r}: choose from {choices}")
    if seq_len is None:
        raise InputError(
            f"--data-dtype {data_dtype}: raw token files do not say how long a row is: give"
            " --seq-len"
        )
    return TokenRows.open_raw(data_dir, dtype=data_dtype, seq_len=seq_len, vocab_size=vocab_size)


def _check_validation(rows: TokenRows, validation_rows: TokenRows, notes: list[str]) -> None:
    if validation_rows.seq_len != rows.seq_len:
        raise InputError(
            f"--val-data-dir {validation_rows.directory}: its rows hold {validation_rows.seq_len}"
            f" tokens, but those of --data-dir hold {rows.seq_len}: prepare both together"
        )
    _check_contents(validation_rows)
    if _is_small(validation_rows):
        validation_rows.largest_id()
    if validation_rows.directory.resolve() == rows.directory.resolve():
        notes.append(
            "warning: --val-data-dir is the training data: its loss says nothing of unseen text"
        )


def _check_contents(rows: TokenRows) -> None:
    """Refuse files that are not what their manifest says, where reading them all is quick."""
    if rows.split is None or not rows.is_described() or not _is_small(rows):
        return
    digests = {entry.name: entry.xxh3_128 for entry in rows.split.files}
    for file in rows.files:
        if file_digest(file.path) != digests[file.path.name]:
            raise InputError(
                f"{file.path}: its content is not what the manifest tells: restore the file, or"
                " prepare the data again, and give that as --data-dir"
            )


def _vocabulary_note(rows: TokenRows) -> str:
    """Say when most of the vocabulary can never be learned; refuse ids beyond it."""
    assert rows.vocab_size is not None, "the rows were opened for a model"
    rows.largest_id()
    warning = vocabulary_warning(rows, rows.vocab_size)
    return f"warning: {warning}" if warning else ""


def _is_small(rows: TokenRows) -> bool:
    return sum(file.file_bytes for file in rows.files) <= READ_ALL_BYTES


def _tokenizer(rows: TokenRows, data_dir: str) -> bytes | None:
    """Read the tokenizer beside the training folder; refuse one that is not the manifest's."""
    path = Path(data_dir).absolute().parent / TOKENIZER_NAME
    if not path.is_file():
        return None
    data = path.read_bytes()
    if rows.manifest and _digest(data) != rows.manifest.tokenizer_xxh3_128:
        raise InputError(
            f"{path}: this is not the tokenizer that the data was prepared with: restore it, or"
            " prepare the data again, and give that as --data-dir"
        )
    return data
