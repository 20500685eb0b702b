"""Text files become a data set: read, split, tokenized, packed, published.

Owns the order of the work and its passes over the text: one to see what is there and decide the
split, one to train the tokenizer on the train split alone, one to encode. Memory does not grow with
the text. Nothing is visible before everything is there, and the same files and options give the
same bytes.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shardb.errors import StorageFailedError, StorageFullError
from trainer.data.corpus import Corpus
from trainer.data.manifest import MANIFEST_NAME, SPLITS, TOKENIZER_NAME, Manifest, SplitEntry
from trainer.data.options import PrepareOptions
from trainer.data.packing import RowPacker, dtype_for
from trainer.data.prepare_records import encoded_records, record_encoder
from trainer.data.progress import NoProgress, PrepareProgress
from trainer.data.publish import partial_directory, refuse_target
from trainer.data.source_bytes import refuse_unreadable
from trainer.data.split import Part
from trainer.data.tokenizer import TextTokenizer
from trainer.errors import InputError

_BATCH_CHARACTERS = 1 << 20
_BATCH_PARTS_MAX = 4096
_UNKNOWN_SHARE_MAX = 0.001


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A finished data set and what the user should know of it."""

    path: Path
    manifest: Manifest
    warnings: tuple[str, ...]


def prepare(options: PrepareOptions, progress: PrepareProgress | None = None) -> Prepared:
    """Make the data set of `options` and return what is in it.

    Raises InputError for files and options that cannot be used, ConflictError when the directory
    is there, StorageFullError and StorageFailedError when writing fails; nothing is left then.
    """
    shown = progress or NoProgress()
    target = refuse_target(options.out, overwrite=options.overwrite)
    for path in (*options.text, *options.val_text):
        refuse_unreadable(path)
    given = _given_tokenizer(options)
    encoder = None
    if options.has_records and given is not None:
        # A record that cannot be encoded is found where its file and line are known.
        encoder = record_encoder(given, options)
        options = replace(options, rules=replace(options.rules, fault=encoder.fault))
    # The directory is made first: a place that cannot be written to is told before the work.
    with (
        _storage_errors(target),
        partial_directory(target, overwrite=options.overwrite) as partial,
    ):
        corpus = Corpus(options, shown)
        tokenizer = given or _trained_tokenizer(corpus, options, shown)
        if encoder is not None:
            found = encoded_records(corpus, tokenizer, encoder, options, partial.path, shown)
        else:
            found = _encoded(corpus, tokenizer, options, partial.path, shown)
        splits, record_notes = found
        manifest = _manifest(corpus, tokenizer, options, splits)
        (partial.path / TOKENIZER_NAME).write_bytes(tokenizer.json_bytes)
        (partial.path / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
        partial.publish()
    warnings = (*_warnings(corpus, options, manifest), *record_notes)
    return Prepared(path=options.out, manifest=manifest, warnings=warnings)


def _given_tokenizer(options: PrepareOptions) -> TextTokenizer | None:
    if options.tokenizer is None:
        return None
    tokenizer = TextTokenizer.from_file(options.tokenizer, options.end_of_text)
    if options.vocab_size is not None and tokenizer.vocab_size > options.vocab_size:
        raise InputError(
            f"--vocab-size {options.vocab_size}: {options.tokenizer} has "
            f"{tokenizer.vocab_size:,} ids; give at least {tokenizer.vocab_size} or leave it out"
        )
    return tokenizer


def _trained_tokenizer(
    corpus: Corpus, options: PrepareOptions, progress: PrepareProgress
) -> TextTokenizer:
    assert options.vocab_size is not None, "the options were checked"
    progress.begin("training the tokenizer", corpus.text_bytes)
    tokenizer = TextTokenizer.trained(corpus.training_texts(), options.vocab_size)
    progress.end()
    return tokenizer


def _encoded(
    corpus: Corpus,
    tokenizer: TextTokenizer,
    options: PrepareOptions,
    folder: Path,
    progress: PrepareProgress,
) -> tuple[dict[str, SplitEntry], list[str]]:
    """Write every row of both splits and return what the manifest says of them."""
    packers = {
        name: RowPacker(
            folder / name,
            seq_len=options.seq_len,
            dtype=dtype_for(tokenizer.vocab_size),
            vocab_size=tokenizer.vocab_size,
            rows_per_file=options.rows_per_file,
        )
        for name in SPLITS
    }
    progress.begin("encoding", corpus.total_bytes)
    try:
        for batch in _batches(corpus.val_text_parts()):
            _encode_batch(batch, tokenizer, packers)
        if options.val_text:  # Too few of them are noticed before the long part.
            _refuse_no_row("val", packers["val"], options)
        for batch in _batches(corpus.text_parts()):
            _encode_batch(batch, tokenizer, packers)
        progress.end()
        for name, packer in packers.items():
            _refuse_no_row(name, packer, options)
        return {n: packer.finish(tokenizer.unknown_id) for n, packer in packers.items()}, []
    finally:
        for packer in packers.values():
            packer.close()


def _batches(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Gather parts into lists of bounded size: what bounds memory and lets cores share work."""
    batch: list[Part] = []
    characters = 0
    for part in parts:
        batch.append(part)
        characters += len(part.text)
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_PARTS_MAX:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode_batch(
    batch: list[Part], tokenizer: TextTokenizer, packers: Mapping[str, RowPacker]
) -> None:
    encoded = tokenizer.encode([part.text for part in batch])
    end = np.array([tokenizer.end_of_text_id], dtype=np.uint32)
    streams: dict[str, list[np.ndarray[tuple[int], np.dtype[np.uint32]]]] = {
        name: [] for name in packers
    }
    for part, ids in zip(batch, encoded, strict=True):
        streams[part.split] += [ids, end] if part.last else [ids]
        packers[part.split].documents += part.last
        packers[part.split].text_bytes += len(part.text.encode())
    for name, stream in streams.items():
        if stream:
            packers[name].add(np.concatenate(stream))


def _refuse_no_row(name: str, packer: RowPacker, options: PrepareOptions) -> None:
    least = options.seq_len + 1
    if packer.tokens >= least:
        return
    remedy = "give more text or a smaller --seq-len"
    if name == "val":
        more = "more --val-text" if options.val_text else "a larger --val-fraction or --val-text"
        remedy = f"{remedy}, or {more}"
    raise InputError(
        f"the {name} split has {packer.tokens:,} tokens of {packer.documents:,} documents, less "
        f"than the {least:,} of one row; {remedy}"
    )


def _manifest(
    corpus: Corpus,
    tokenizer: TextTokenizer,
    options: PrepareOptions,
    splits: Mapping[str, SplitEntry],
) -> Manifest:
    return Manifest(
        seq_len=options.seq_len,
        dtype="uint32" if options.has_records else dtype_for(tokenizer.vocab_size).name,
        vocab_size=tokenizer.vocab_size,
        end_of_text_token=tokenizer.end_of_text_token,
        end_of_text_id=tokenizer.end_of_text_id,
        tokenizer_xxh3_128=tokenizer.digest,
        tokenizer_trained=options.tokenizer is None,
        split_by=corpus.split_by,
        val_fraction=None if options.val_text else options.val_fraction,
        seed=options.seed,
        documents_in_both=corpus.documents_in_both,
        train=splits["train"],
        val=splits["val"],
        sources=corpus.entries,
        masked=options.has_records,
        apart=options.keeps_apart,
    )


def _warnings(corpus: Corpus, options: PrepareOptions, manifest: Manifest) -> Iterator[str]:
    """Yield what is no error but would surprise later."""
    bad_lines = sum(entry.bad_lines for entry in manifest.sources)
    if bad_lines:
        yield f"{bad_lines:,} bad lines were left out, for instance: {corpus.bad_examples[0]}"
    if manifest.documents_in_both:
        yield (
            f"{manifest.documents_in_both:,} documents of --text are in --val-text too; "
            "they were left out of train"
        )
    if manifest.tokenizer_trained and manifest.vocab_size < (options.vocab_size or 0):
        yield (
            f"the text gave {manifest.vocab_size:,} token ids, not {options.vocab_size:,}: "
            "it is too short for more; a model of that --vocab-size would be enough"
        )
    for name in SPLITS:
        split = manifest.split(name)
        if split.unknown_tokens > _UNKNOWN_SHARE_MAX * split.tokens:
            yield (
                f"{split.unknown_tokens:,} of {split.tokens:,} tokens of the {name} split are "
                "unknown to the tokenizer; their text is lost"
            )


@contextmanager
def _storage_errors(target: Path) -> Iterator[None]:
    """Name a failure to write by what the user does next. Reading has errors of its own."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise InputError(
                f"{target}: cannot be written ({reason}); give another --out"
            ) from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFullError(
                f"{target}: {reason}; {_free_bytes(target):,} bytes are free now that what was "
                "written is removed: free some space or give --out on another disk",
                path=str(target),
            ) from error
        raise StorageFailedError(
            f"{target}: writing failed ({reason}); nothing was kept: check the disk, try again",
            path=str(target),
        ) from error


def _free_bytes(target: Path) -> int:
    return shutil.disk_usage(target.parent).free
