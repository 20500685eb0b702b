"""Is a manifest read back as it was written, and is every field that is wrong named?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.data.manifest import (
    FileEntry,
    Manifest,
    SourceEntry,
    SplitEntry,
    find_manifest,
    load_manifest,
)
from trainer.errors import InputError


def split_entry(rows: int = 3) -> SplitEntry:
    entry = FileEntry(name="rows-00000.npy", rows=rows, bytes=140, largest_id=9, xxh3_128="ab" * 16)
    return SplitEntry(
        documents=2,
        text_bytes=50,
        tokens=10,
        tokens_dropped=1,
        rows=rows,
        largest_id=9,
        distinct_ids=7,
        unknown_tokens=0,
        unigram_entropy_nats=1.25,
        files=(entry,),
    )


def manifest(val_fraction: float | None = 0.05) -> Manifest:
    source = SourceEntry(
        role="text", name="é.txt", bytes=9, xxh3_128="cd" * 16, documents=4, bad_lines=0
    )
    return Manifest(
        seq_len=8,
        dtype="uint16",
        vocab_size=300,
        end_of_text_token="<|endoftext|>",
        end_of_text_id=0,
        tokenizer_xxh3_128="ef" * 16,
        tokenizer_trained=True,
        split_by="document hash",
        val_fraction=val_fraction,
        seed=0,
        documents_in_both=0,
        train=split_entry(),
        val=split_entry(1),
        sources=(source,),
    )


@pytest.mark.parametrize("val_fraction", [0.05, None])
def test_is_what_was_written_read_back(val_fraction: float | None, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(manifest(val_fraction).to_json(), encoding="utf-8")
    assert load_manifest(path) == manifest(val_fraction)


def without(*keys: Any) -> str:
    return changed(*keys, value=None)


def changed(*keys: Any, value: Any) -> str:
    body = json.loads(manifest().to_json())
    inner = body
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    return json.dumps(body)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (changed("seq_len", value="8"), "field seq_len is '8', not int"),
        (changed("seq_len", value=True), "field seq_len is True, not int"),
        (changed("seq_len", value=8.0), "field seq_len is 8.0, not int"),
        (changed("val_fraction", value="x"), "field val_fraction is 'x'"),
        (changed("tokenizer_trained", value=1), "field tokenizer_trained is 1, not bool"),
        (without("dtype"), "field dtype is None, not str"),
        (without("train"), "field files is no list"),
        (without("train", "rows"), "field rows is None, not int"),
        (changed("val", "files", value=[3]), "FileEntry is no JSON object"),
        (changed("val", "files", 0, "bytes", value="9"), "field bytes is '9', not int"),
        (changed("sources", value={}), "field sources is no list"),
        (changed("format_version", value=4), "version is 4; this version reads 1 to 3"),
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_is_a_wrong_field_named(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_manifest(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert reason in str(caught.value)


def test_is_text_that_is_not_utf8_refused(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"manifest\.json: cannot be read"):
        load_manifest(path)


def test_is_a_manifest_of_something_else_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    (tmp_path / "train").mkdir()
    for text in ('{"format": "other"}', "[]", "3", '{"name": "app", "version": "1"}'):
        path.write_text(text)
        assert load_manifest(path) is None
        assert find_manifest(tmp_path / "train") is None


def test_is_a_manifest_found_from_its_splits_alone(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(manifest().to_json(), encoding="utf-8")
    for name in ("train", "val", "other"):
        (tmp_path / name).mkdir()
    assert find_manifest(tmp_path / "train") == (manifest(), split_entry())
    assert find_manifest(tmp_path / "val") == (manifest(), split_entry(1))
    assert find_manifest(tmp_path / "other") is None
