"""Does text become a data set that holds all of it, the same every time, or nothing at all?"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import zstandard

from shardb.errors import ConflictError
from tests.support.stories import END, STORIES, files_of, options, story, write_text
from trainer.data import packing, readers, source_bytes
from trainer.data import prepare as prepare_module
from trainer.data.batches import validation_batches
from trainer.data.manifest import Manifest, file_digest, load_manifest
from trainer.data.prepare import Prepared, prepare
from trainer.data.readers import ReadRules
from trainer.data.rows import TokenRows
from trainer.data.split import document_hash
from trainer.data.tokenizer import TextTokenizer
from trainer.errors import InputError


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "stories.txt", STORIES)


def stream(out: Path, split: str) -> list[int]:
    """Read the ids of a split back, the shared id of two rows once."""
    rows = TokenRows.open(out / split)
    ids = np.concatenate([batch[:, 1:].reshape(-1) for batch in validation_batches(rows, 7)])
    return [int(rows.row(0)[0]), *ids.tolist()]


def documents_of(out: Path, split: str) -> list[str]:
    """Decode a split; the last document is cut off where no row was filled."""
    tokenizer = TextTokenizer.from_file(out / "tokenizer.json")
    return tokenizer.decode(stream(out, split)).split(END)


def test_does_all_the_text_come_back_each_document_in_one_split(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "data"
    prepare(options(text, out, val_fraction=0.2))
    assert sorted(os.listdir(out)) == ["manifest.json", "tokenizer.json", "train", "val"]
    found = {name: documents_of(out, name) for name in ("train", "val")}
    for name, documents in found.items():
        assert set(documents[:-1]) <= set(STORIES), name
    lost = set(STORIES) - set(found["train"]) - set(found["val"])
    assert len(lost) <= 2  # The two that were being read when no row was filled any more.
    assert not set(found["train"][:-1]) & set(found["val"][:-1])
    order = [STORIES.index(document) for document in found["train"][:-1]]
    assert order == sorted(order)


def test_does_the_manifest_tell_what_is_there(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "data"
    made = prepare(options(text, out, rows_per_file=40))
    manifest = load_manifest(out / "manifest.json")
    assert manifest == made.manifest
    assert made.warnings == ()
    check_manifest(manifest, out)
    assert manifest.sources[0].documents == len(STORIES)
    assert manifest.sources[0].xxh3_128 == file_digest(text)
    assert manifest.train.documents + manifest.val.documents == len(STORIES)
    assert len(manifest.train.files) > 1
    val_hashes = sorted(document_hash(document, 0) for document in STORIES)
    assert manifest.val.documents < len(val_hashes) / 5


def check_manifest(manifest: Manifest, out: Path) -> None:
    tokenizer = TextTokenizer.from_file(out / "tokenizer.json")
    assert manifest.tokenizer_xxh3_128 == tokenizer.digest
    assert (manifest.vocab_size, manifest.end_of_text_id) == (320, 0)
    for name in ("train", "val"):
        split, ids = manifest.split(name), stream(out, name)
        rows = TokenRows.open(out / name, manifest.vocab_size)
        assert rows.is_described()
        assert rows.row_count == split.rows
        assert len(ids) == split.tokens - split.tokens_dropped
        assert max(ids) == split.largest_id == rows.largest_id()
        assert ids.count(0) in (split.documents - 1, split.documents)
        for entry, file in zip(split.files, rows.files, strict=True):
            assert entry.xxh3_128 == file_digest(file.path)


def test_are_the_same_files_and_options_the_same_bytes(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(options(text, tmp_path / "one"))
    # Neither where blocks end nor how many documents are encoded together may matter.
    monkeypatch.setattr(source_bytes, "BLOCK_BYTES", 77)
    monkeypatch.setattr(prepare_module, "_BATCH_CHARACTERS", 500)
    copy = tmp_path / "elsewhere" / "stories.txt"
    copy.parent.mkdir()
    copy.write_bytes(text.read_bytes())
    prepare(options(copy, tmp_path / "two"))
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


def test_does_another_seed_hold_out_other_documents(text: Path, tmp_path: Path) -> None:
    prepare(options(text, tmp_path / "one"))
    prepare(options(text, tmp_path / "two", seed=1))
    assert documents_of(tmp_path / "one", "val") != documents_of(tmp_path / "two", "val")


def test_is_a_packed_or_json_file_the_same_text(text: Path, tmp_path: Path) -> None:
    packed = tmp_path / "stories.txt.zst"
    packed.write_bytes(zstandard.ZstdCompressor().compress(text.read_bytes()))
    lines = tmp_path / "stories.jsonl"
    lines.write_text("".join(json.dumps({"text": document}) + "\n" for document in STORIES))
    for name, path in (("plain", text), ("packed", packed), ("lines", lines)):
        prepare(options(path, tmp_path / name))
    plain = files_of(tmp_path / "plain")
    for name in ("packed", "lines"):
        found = files_of(tmp_path / name)
        del found["manifest.json"]
        assert found == {k: v for k, v in plain.items() if k != "manifest.json"}


def test_is_running_text_split_into_its_beginning_and_its_end(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    whole = "\n\n".join(STORIES)
    book.write_text(whole, encoding="utf-8")
    made = prepare(options(book, tmp_path / "data", val_fraction=0.1))
    assert made.manifest.split_by == "document tails"
    train = documents_of(tmp_path / "data", "train")[0]
    val = documents_of(tmp_path / "data", "val")[0]
    assert whole.startswith(train)
    assert val in whole
    assert whole.index(val) >= len(train)
    assert 0.05 < len(val) / len(whole) < 0.11


def test_is_the_tokenizer_trained_on_train_alone(text: Path, tmp_path: Path) -> None:
    secret = "zyzzyva " * 60
    held_out = write_text(tmp_path / "val.txt", [secret + story for story in STORIES[:20]])
    made = prepare(options(text, tmp_path / "data", val_text=(held_out,)))
    assert made.manifest.split_by == "separate files"
    vocabulary = json.loads((tmp_path / "data" / "tokenizer.json").read_text())["model"]["vocab"]
    assert not [token for token in vocabulary if "zy" in token]
    assert [token for token in vocabulary if "cat" in token]


def test_is_a_document_of_the_validation_files_left_out_of_train(
    text: Path, tmp_path: Path
) -> None:
    held_out = write_text(tmp_path / "val.txt", STORIES[10:30])
    made = prepare(options(text, tmp_path / "data", val_text=(held_out,)))
    assert made.manifest.documents_in_both == 20
    assert "20 documents of --text are in --val-text too" in made.warnings[0]
    assert not set(documents_of(tmp_path / "data", "train")) & set(STORIES[10:30])


def test_is_a_given_tokenizer_stored_as_it_is(text: Path, tmp_path: Path) -> None:
    prepare(options(text, tmp_path / "one"))
    given = tmp_path / "one" / "tokenizer.json"
    made = prepare(options(text, tmp_path / "two", tokenizer=given, vocab_size=None))
    assert not made.manifest.tokenizer_trained
    assert (tmp_path / "two" / "tokenizer.json").read_bytes() == given.read_bytes()
    assert (
        files_of(tmp_path / "one")["train/rows-00000.npy"]
        == (files_of(tmp_path / "two")["train/rows-00000.npy"])
    )
    with pytest.raises(InputError, match="has 320 ids; give at least 320"):
        prepare(options(text, tmp_path / "three", tokenizer=given, vocab_size=319))


def test_is_a_data_set_replaced_only_when_asked(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "data"
    prepare(options(text, out))
    before = files_of(out)
    with pytest.raises(ConflictError, match="--overwrite"):
        prepare(options(text, out, seed=1))
    assert files_of(out) == before
    prepare(options(text, out, seed=1, overwrite=True))
    assert files_of(out) != before
    prepare(options(text, out, overwrite=True, tokenizer=out / "tokenizer.json"))
    assert sorted(os.listdir(tmp_path)) == ["data", "stories.txt"]


def test_are_bad_lines_refused_or_counted(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    good = [json.dumps({"text": document}) for document in STORIES]
    path.write_text("\n".join([*good[:60], "{broken", *good[60:]]))
    with pytest.raises(InputError, match=r"lines\.jsonl: line 61: not valid JSON"):
        prepare(options(path, tmp_path / "data"))
    made = prepare(options(path, tmp_path / "data", rules=ReadRules(skip_bad=True)))
    assert made.manifest.sources[0].bad_lines == 1
    assert made.manifest.sources[0].documents == len(STORIES)
    assert "1 bad lines were left out" in made.warnings[0]
    assert "line 61" in made.warnings[0]


def test_are_large_ids_stored_wide(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "UINT16_IDS", 300)
    made = prepare(options(text, tmp_path / "data"))
    assert made.manifest.dtype == "uint32"
    assert TokenRows.open(tmp_path / "data" / "train").files[0].dtype == np.dtype("<u4")
    assert documents_of(tmp_path / "data", "train")[0] in STORIES


def test_is_a_text_too_short_for_its_vocabulary_told(text: Path, tmp_path: Path) -> None:
    made: Prepared = prepare(options(text, tmp_path / "data", vocab_size=50_000))
    assert made.manifest.vocab_size < 1000
    assert "the text gave" in made.warnings[0]


def test_are_tokens_unknown_to_the_tokenizer_told(text: Path, tmp_path: Path) -> None:
    tokenizer = tmp_path / "words.json"
    vocab = {"<unk>": 0, "</s>": 1, "The": 2, "cat": 3, "sees": 4, "the": 5}
    tokenizer.write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "normalizer": None,
                "pre_tokenizer": {"type": "Whitespace"},
                "post_processor": None,
                "decoder": None,
                "truncation": None,
                "padding": None,
                "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
            }
        )
    )
    made = prepare(options(text, tmp_path / "data", tokenizer=tokenizer, vocab_size=None))
    assert made.manifest.train.unknown_tokens > 100
    assert "unknown to the tokenizer" in made.warnings[0]


def test_is_a_set_of_long_documents_read_in_pieces_the_same(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(options(text, tmp_path / "one", val_text=(held_out(tmp_path),)))
    monkeypatch.setattr(readers, "PIECE_CHARACTERS_MAX", 150)
    prepare(options(text, tmp_path / "two", val_text=(tmp_path / "val.txt",)))
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


def held_out(folder: Path) -> Path:
    return write_text(folder / "val.txt", [story(number) for number in range(900, 915)])
