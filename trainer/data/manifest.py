"""The manifest of a prepared data set: its contents, its sources and every file's digest.

Owns `manifest.json` (canonical JSON, so equal data sets have equal bytes) and its strict reading.
It does not look at token files: `rows` and `inspect` tell whether they still are what it says.
It holds no time, no absolute path and no machine: the same input and flags give the same bytes.

    DIR/manifest.json, DIR/tokenizer.json, DIR/train/*.npy, DIR/val/*.npy
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import xxhash

from trainer.errors import InputError

MANIFEST_NAME: Final = "manifest.json"
TOKENIZER_NAME: Final = "tokenizer.json"
FORMAT: Final = "token-rows"
FORMAT_VERSION: Final = 1
# Rows with marks (`masked`): who does not know them must not read them.
MASKED_FORMAT_VERSION: Final = 2
# And records that share a row are marked (`apart`): who does not know it would let them mix.
APART_FORMAT_VERSION: Final = 3
FORMAT_VERSIONS: Final = (FORMAT_VERSION, MASKED_FORMAT_VERSION, APART_FORMAT_VERSION)
SPLITS: Final = ("train", "val")

_READ_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One token file: its name inside its split's folder, shape, largest id and content."""

    name: str
    rows: int
    bytes: int
    largest_id: int
    xxh3_128: str


@dataclass(frozen=True, kw_only=True)
class SplitEntry:
    """One split. `tokens` counts the stream, `tokens_dropped` its end that filled no row.

    `unigram_entropy_nats` is the loss of the best predictor that ignores all context: a model
    whose loss on this split is not below it has learned frequencies at most.
    """

    documents: int
    text_bytes: int
    tokens: int
    tokens_dropped: int
    rows: int
    largest_id: int
    distinct_ids: int
    unknown_tokens: int
    unigram_entropy_nats: float
    files: tuple[FileEntry, ...]


@dataclass(frozen=True, kw_only=True)
class SourceEntry:
    """One text file that was read; `role` is "text" or "val-text"."""

    role: str
    name: str
    bytes: int
    xxh3_128: str
    documents: int
    bad_lines: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A prepared data set. `masked`: its rows mark the tokens that are not learned.

    apart: they also mark where records begin that are not to see each other.
    """

    seq_len: int
    dtype: str
    vocab_size: int
    end_of_text_token: str
    end_of_text_id: int
    tokenizer_xxh3_128: str
    tokenizer_trained: bool
    split_by: str
    val_fraction: float | None
    seed: int
    documents_in_both: int
    train: SplitEntry
    val: SplitEntry
    sources: tuple[SourceEntry, ...]
    masked: bool = False
    apart: bool = False

    def split(self, name: str) -> SplitEntry:
        """Return the split of that name (one of SPLITS)."""
        return {"train": self.train, "val": self.val}[name]

    def to_json(self) -> str:
        """Return the canonical text of the file, with a final newline."""
        values = asdict(self)
        version = FORMAT_VERSIONS[values.pop("masked") + values.pop("apart")]
        body = {"format": FORMAT, "format_version": version, **values}
        return json.dumps(body, indent=2, sort_keys=True, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str, *, path: Path) -> Manifest:
        """Read what `to_json` wrote; InputError names the file and the field that is wrong."""
        body = _parsed(text, path)
        if body is None:
            raise InputError(f"{path}: not a manifest of {FORMAT}; prepare the data again")
        version = body.get("format_version")
        if version not in FORMAT_VERSIONS:
            raise InputError(
                f"{path}: field format_version is {version!r}; this version reads "
                f"{FORMAT_VERSION} to {APART_FORMAT_VERSION}: upgrade, or prepare the data again"
            )
        return _manifest_from(body, path)


def find_manifest(directory: Path) -> tuple[Manifest, SplitEntry] | None:
    """Return the manifest that describes the token files of `directory`, if there is one.

    `directory` is a split's folder (DIR/train). A manifest.json of something else is ignored.
    """
    path = directory.parent / MANIFEST_NAME
    if directory.name not in SPLITS or not path.is_file():
        return None
    manifest = load_manifest(path)
    return None if manifest is None else (manifest, manifest.split(directory.name))


def load_manifest(path: Path) -> Manifest | None:
    """Read one manifest; None when the file is JSON of another kind."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); prepare the data again") from error
    return None if _parsed(text, path) is None else Manifest.from_json(text, path=path)


def file_digest(path: Path) -> str:
    """Return the xxh3-128 of a file's bytes, in constant memory."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _parsed(text: str, path: Path) -> Mapping[str, Any] | None:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error}); prepare the data again") from error
    return body if isinstance(body, dict) and body.get("format") == FORMAT else None


_Entry = TypeVar("_Entry", FileEntry, SplitEntry, SourceEntry, Manifest)
_PLAIN_TYPES: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "str": (str,),
        "int": (int,),
        "bool": (bool,),
        "float": (int, float),
        "float | None": (int, float, type(None)),
    }
)


def _entry_from(kind: type[_Entry], body: Any, path: Path, nested: Mapping[str, Any]) -> _Entry:
    """Build a dataclass from a JSON object, every plain field checked against its annotation."""
    if not isinstance(body, dict):
        raise InputError(f"{path}: {kind.__name__} is no JSON object; prepare the data again")
    values: dict[str, Any] = {}
    for field in fields(kind):
        if field.name in nested:
            values[field.name] = nested[field.name]
            continue
        value = body.get(field.name)
        allowed = _PLAIN_TYPES[str(field.type)]
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            raise InputError(
                f"{path}: field {field.name} is {value!r}, not {field.type}; prepare the data again"
            )
        values[field.name] = value
    return kind(**values)


def _split_from(body: Any, path: Path) -> SplitEntry:
    files = tuple(_entry_from(FileEntry, item, path, {}) for item in _items(body, "files", path))
    return _entry_from(SplitEntry, body, path, {"files": files})


def _manifest_from(body: Mapping[str, Any], path: Path) -> Manifest:
    sources = tuple(
        _entry_from(SourceEntry, item, path, {}) for item in _items(body, "sources", path)
    )
    nested: dict[str, Any] = {
        "sources": sources,
        **{name: _split_from(body.get(name), path) for name in SPLITS},
    }
    nested["masked"] = body["format_version"] >= MASKED_FORMAT_VERSION
    nested["apart"] = body["format_version"] == APART_FORMAT_VERSION
    return _entry_from(Manifest, body, path, nested)


def _items(body: Any, field: str, path: Path) -> list[Any]:
    items = body.get(field) if isinstance(body, dict) else None
    if not isinstance(items, list):
        raise InputError(f"{path}: field {field} is no list; prepare the data again")
    return items
