"""What is in a prepared data set, and whether it still is what its manifest says.

Owns the report of `train-data inspect` and the findings of its verification. It changes nothing and
prints nothing. A folder of token files without a manifest is reported as far as it goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainer.data.manifest import (
    MANIFEST_NAME,
    SPLITS,
    TOKENIZER_NAME,
    FileEntry,
    Manifest,
    file_digest,
    load_manifest,
)
from trainer.data.masked import ids_of
from trainer.data.row_file import npy_file
from trainer.data.rows import Progress, TokenRows
from trainer.data.tokenizer import TextTokenizer
from trainer.errors import InputError

TOKENIZER_CHANGED: Final = "tokenizer_changed"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One way in which a data set is not what its manifest says."""

    kind: str
    path: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One row: its ids, and its text where a tokenizer is known."""

    row: int
    ids: tuple[int, ...]
    text: str | None


@dataclass(frozen=True, kw_only=True)
class SplitReport:
    """One folder of token rows; None where only a manifest could tell."""

    name: str
    path: str
    files: int
    rows: int
    seq_len: int
    dtype: str
    tokens: int
    largest_id: int
    documents: int | None
    distinct_ids: int | None
    unigram_entropy_nats: float | None
    samples: tuple[Sample, ...]


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """A data set; `findings` is empty unless it was verified and is damaged."""

    path: str
    vocab_size: int | None
    end_of_text_token: str | None
    end_of_text_id: int | None
    split_by: str | None
    verified: bool
    splits: tuple[SplitReport, ...]
    findings: tuple[Finding, ...]


def inspect(
    directory: Path,
    *,
    sample_rows: int = 1,
    tokenizer: Path | None = None,
    verify: bool = False,
    progress: Progress | None = None,
) -> Inspection:
    """Report on a prepared directory, one of its splits, or any folder of token files.

    With `verify` every byte is read and damage becomes findings; without it damage that is met
    raises InputError.
    """
    folders = _split_folders(directory)
    manifest_path = folders[0].absolute().parent / MANIFEST_NAME
    manifest = None
    if folders[0].name in SPLITS and manifest_path.is_file():
        manifest = load_manifest(manifest_path)
    findings = tuple(_verified(folders, manifest, progress)) if verify else ()
    is_readable = not any(finding.kind == TOKENIZER_CHANGED for finding in findings)
    decoder = _decoder(folders[0], tokenizer) if tokenizer or is_readable else None
    reports = []
    for folder in folders:
        try:
            reports.append(_split_report(folder, decoder, sample_rows))
        except InputError:
            # What cannot be read is a finding already.
            if not findings:
                raise
    return Inspection(
        path=str(directory),
        vocab_size=manifest.vocab_size if manifest else None,
        end_of_text_token=manifest.end_of_text_token if manifest else None,
        end_of_text_id=manifest.end_of_text_id if manifest else None,
        split_by=manifest.split_by if manifest else None,
        verified=verify,
        splits=tuple(reports),
        findings=findings,
    )


def _split_folders(directory: Path) -> list[Path]:
    if not directory.is_dir():
        what = "not a directory" if directory.exists() else "no such directory"
        raise InputError(f"{directory}: {what}; give one made by `train-data prepare`")
    is_prepared = (directory / MANIFEST_NAME).is_file()
    folders = [directory / name for name in SPLITS]
    return [f for f in folders if is_prepared or f.is_dir()] or [directory]


def _decoder(folder: Path, tokenizer: Path | None) -> TextTokenizer | None:
    beside = folder.absolute().parent / TOKENIZER_NAME
    path = tokenizer or (beside if beside.is_file() else None)
    return TextTokenizer.from_file(path) if path else None


def _split_report(folder: Path, decoder: TextTokenizer | None, sample_rows: int) -> SplitReport:
    with TokenRows.open(folder) as rows:
        split = rows.split if rows.is_described() else None
        count = min(sample_rows, rows.row_count)
        return SplitReport(
            name=folder.name,
            path=str(folder),
            files=len(rows.files),
            rows=rows.row_count,
            seq_len=rows.seq_len,
            dtype=rows.files[0].dtype.name,
            tokens=split.tokens if split else rows.row_count * rows.seq_len + 1,
            largest_id=rows.largest_id(),
            documents=split.documents if split else None,
            distinct_ids=split.distinct_ids if split else None,
            unigram_entropy_nats=split.unigram_entropy_nats if split else None,
            # Rows evenly spread over the set tell more than its beginning.
            samples=tuple(
                _sample(rows, number * rows.row_count // count, decoder) for number in range(count)
            ),
        )


def _sample(rows: TokenRows, index: int, decoder: TextTokenizer | None) -> Sample:
    ids = tuple(ids_of(rows.row(index)).tolist())
    known = decoder is not None and max(ids) < decoder.vocab_size
    return Sample(row=index, ids=ids, text=decoder.decode(ids) if decoder and known else None)


def _verified(
    folders: list[Path], manifest: Manifest | None, progress: Progress | None
) -> Iterator[Finding]:
    """Check every file against the manifest, or its ids alone where there is none."""
    if manifest is not None:
        yield from _verified_tokenizer(folders[0].absolute().parent / TOKENIZER_NAME, manifest)
    for folder in folders:
        if not folder.is_dir():
            yield Finding(kind="folder_missing", path=str(folder / "*.npy"), message="not there")
            continue
        listed = (
            {entry.name: entry for entry in manifest.split(folder.name).files} if (manifest) else {}
        )
        found = {path.name for path in folder.iterdir() if path.suffix == ".npy"}
        for name in sorted(found | set(listed)):
            yield from _verified_file(folder / name, listed.get(name), manifest)
        if progress:
            progress(folders.index(folder) + 1, len(folders))


def _verified_tokenizer(path: Path, manifest: Manifest) -> Iterator[Finding]:
    if not path.is_file():
        yield Finding(kind="tokenizer_missing", path=str(path), message="not there")
    elif file_digest(path) != manifest.tokenizer_xxh3_128:
        yield Finding(
            kind=TOKENIZER_CHANGED,
            path=str(path),
            message="not the tokenizer that made the rows; their text would be another",
        )


def _verified_file(
    path: Path, entry: FileEntry | None, manifest: Manifest | None
) -> Iterator[Finding]:
    if not path.exists():
        yield Finding(kind="file_missing", path=str(path), message="listed but not there")
        return
    if entry is None and manifest is not None:
        yield Finding(kind="file_unlisted", path=str(path), message="not in the manifest")
    try:
        file = npy_file(path)
        vocab_size = manifest.vocab_size if manifest else None
        is_masked = manifest is not None and manifest.masked
        TokenRows(path.parent, (file,), vocab_size, is_masked=is_masked).largest_id()
    except InputError as error:
        yield Finding(kind="file_refused", path=str(path), message=str(error))
        return
    digest = file_digest(path)
    if entry is not None and digest != entry.xxh3_128:
        yield Finding(
            kind="file_changed",
            path=str(path),
            message=f"expected xxh3-128 {entry.xxh3_128}, found {digest}",
        )
