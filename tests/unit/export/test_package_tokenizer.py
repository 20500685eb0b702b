"""Do tokenizer and configuration agree, whatever the tokenizer comes with?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardb
from export.package_tokenizer import (
    check_vocabulary,
    is_of_qwen2,
    tokenizer_of_folder,
    tokenizer_of_store,
)
from tests.support.exports import byte_tokenizer, make_store
from tests.support.tiny_model import TINY
from trainer.errors import InputError

MODEL = replace(TINY, vocab_size=300, pad_token_id=0, bos_token_id=0, eos_token_id=0)


@pytest.fixture(scope="module")
def data() -> bytes:
    return byte_tokenizer(MODEL.vocab_size)


def folder_of(tmp_path: Path, data: bytes, settings: dict[str, Any] | None = None) -> Path:
    (tmp_path / "tokenizer.json").write_bytes(data)
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_are_the_models_ids_special_only_where_the_tokenizer_says_so(
    data: bytes, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, data)
    found = tokenizer_of_folder(folder, MODEL)
    assert (found.special.bos, found.special.eos, found.special.pad) == (0, 0, 0)
    assert found.notes == ()
    # A run that had no tokenizer has the defaults 0, 1 and 2: letters here, and no end of a text.
    plain = tokenizer_of_folder(folder, replace(MODEL, bos_token_id=1, eos_token_id=2))
    assert (plain.special.bos, plain.special.eos, plain.special.pad) == (None, None, 0)
    assert "no special token" in plain.notes[0]
    assert "eos_token" not in json.loads(plain.files["tokenizer_config.json"])


@pytest.mark.parametrize("token", ["<|endoftext|>", {"content": "<|endoftext|>", "lstrip": False}])
def test_do_the_folders_settings_come_first(data: bytes, tmp_path: Path, token: Any) -> None:
    settings = {
        "eos_token": token,
        "pad_token": None,
        "tokenizer_class": "TokenizersBackend",
        "backend": "tokenizers",
        "chat_template": "{{ messages }}",
        "padding_side": "left",
    }
    model = replace(MODEL, eos_token_id=7)
    found = tokenizer_of_folder(folder_of(tmp_path, data, settings), model)
    assert (found.special.eos, found.special.pad) == (0, None)
    assert "ends texts with '<|endoftext|>' (id 0), the run with id 7" in found.notes[0]
    made = json.loads(found.files["tokenizer_config.json"])
    assert made["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert made["padding_side"] == "left"
    assert "backend" not in made
    assert found.files["chat_template.jinja"] == b"{{ messages }}"
    assert found.files["tokenizer.json"] == data


def test_is_another_vocabulary_refused(data: bytes, tmp_path: Path) -> None:
    found = tokenizer_of_folder(folder_of(tmp_path, data), MODEL)
    check_vocabulary(found, MODEL, allow_padded=False)
    with pytest.raises(InputError, match="have no embedding"):
        check_vocabulary(found, replace(MODEL, vocab_size=299), allow_padded=True)
    padded = replace(MODEL, vocab_size=320)
    with pytest.raises(InputError, match="--allow-padded-vocabulary"):
        check_vocabulary(found, padded, allow_padded=False)
    check_vocabulary(found, padded, allow_padded=True)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", b"{}", "no tokenizer.json"),
        ("tokenizer.json", b"\x1f\x8b", "no tokenizer.json"),
        ("tokenizer_config.json", b"[", "no JSON"),
        ("tokenizer_config.json", b"[]", "no JSON object"),
    ],
)
def test_is_a_broken_file_refused_by_name(
    data: bytes, tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    folder_of(tmp_path, data, {})
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=words) as error:
        tokenizer_of_folder(tmp_path, MODEL)
    assert str(tmp_path) in str(error.value)


def test_is_a_folder_without_a_tokenizer_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--tokenizer"):
        tokenizer_of_folder(tmp_path, MODEL)


def test_is_the_stores_own_tokenizer_found(data: bytes, tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", MODEL, tokenizer=data)
    bare = make_store(tmp_path / "bare", MODEL)
    with shardb.open(store) as opened, opened.at() as view:
        found = tokenizer_of_store(view, MODEL)
        assert found is not None
        assert found.json_bytes == data
        assert found.bos_token == "<|endoftext|>"
    with shardb.open(bare) as opened, opened.at() as view:
        assert tokenizer_of_store(view, MODEL) is None


def test_is_qwen2s_way_of_cutting_recognised(data: bytes, tmp_path: Path) -> None:
    assert not is_of_qwen2(tokenizer_of_folder(folder_of(tmp_path, data), MODEL))
    qwen2 = pytest.importorskip(
        "transformers.models.qwen2.tokenization_qwen2", reason="transformers is not installed"
    )
    document = json.loads(data)
    document["normalizer"] = {"type": "NFC"}
    document["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Split",
                "pattern": {"Regex": qwen2.PRETOKENIZE_REGEX},
                "behavior": "Isolated",
                "invert": False,
            },
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False,
             "trim_offsets": False},
        ],
    }  # fmt: skip
    folder = folder_of(tmp_path, json.dumps(document).encode())
    assert is_of_qwen2(tokenizer_of_folder(folder, MODEL))
