"""Does text survive the way to ids and back, always the same, and never become a control token?"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.readers import PIECE_CHARACTERS_MAX, document_pieces
from trainer.data.tokenizer import END_OF_TEXT, TextTokenizer
from trainer.errors import InputError

SENTENCES = [
    "The cat sat on the mat. It's a good cat, isn't it?\n\n",
    "The end of the cat's 12 stories; another one begins, with a quick brown fox.\n",
    "Pack my box with five dozen liquor jugs, said the wizard to the jumping queen.\n",
]
TEXT = "".join(SENTENCES) * 20


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.trained([TEXT], 300)


def ids_of(tokenizer: TextTokenizer, text: str) -> list[int]:
    return tokenizer.encode([text])[0].tolist()


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=60))
def test_does_every_text_come_back(tokenizer: TextTokenizer, text: str) -> None:
    assert tokenizer.decode(ids_of(tokenizer, text)) == text


def test_are_the_first_ids_the_end_and_the_bytes(tokenizer: TextTokenizer) -> None:
    assert tokenizer.vocab_size == 300
    assert (tokenizer.end_of_text_token, tokenizer.end_of_text_id) == (END_OF_TEXT, 0)
    smallest = TextTokenizer.trained([TEXT], 257)
    assert smallest.vocab_size == 257
    assert len(ids_of(smallest, TEXT)) == len(TEXT.encode())
    assert len(set(ids_of(smallest, TEXT))) == len(set(TEXT))


def test_is_the_same_text_always_the_same_tokenizer() -> None:
    first = TextTokenizer.trained([TEXT, "other words"], 300)
    again = TextTokenizer.trained([TEXT, "other words"], 300)
    assert first.json_bytes == again.json_bytes
    assert first.digest == again.digest
    assert first.digest != TextTokenizer.trained([TEXT, "other words"], 299).digest


def test_does_text_never_become_a_control_token(tokenizer: TextTokenizer) -> None:
    ids = ids_of(tokenizer, f"before {END_OF_TEXT} after")
    assert tokenizer.end_of_text_id not in ids
    assert tokenizer.decode(ids) == f"before {END_OF_TEXT} after"


def test_are_the_tokens_of_pieces_those_of_the_whole(tokenizer: TextTokenizer) -> None:
    text = TEXT * (2 * PIECE_CHARACTERS_MAX // len(TEXT) + 2)
    pieces = [piece.text for piece in document_pieces(text)]
    assert len(pieces) > 2
    assert np.array_equal(np.concatenate(tokenizer.encode(pieces)), tokenizer.encode([text])[0])


def test_is_a_short_text_enough_for_fewer_ids() -> None:
    assert TextTokenizer.trained(["ab ab"], 5000).vocab_size < 300


def saved(tokenizer: TextTokenizer, path: Path, **changes: object) -> Path:
    path.write_text(json.dumps({**json.loads(tokenizer.json_bytes), **changes}))
    return path


def test_is_nothing_cut_off_or_added_by_a_given_tokenizer(
    tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    path = saved(
        tokenizer,
        tmp_path / "t.json",
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": END_OF_TEXT,
        },
        post_processor={
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": END_OF_TEXT, "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {
                END_OF_TEXT: {"id": END_OF_TEXT, "ids": [0], "tokens": [END_OF_TEXT]}
            },
        },
    )
    given_one = TextTokenizer.from_file(path)
    assert ids_of(given_one, TEXT) == ids_of(tokenizer, TEXT)
    assert given_one.json_bytes == path.read_bytes()


def test_is_the_end_of_a_text_found_or_asked_for(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    body = json.loads(tokenizer.json_bytes)
    token = {**body["added_tokens"][0], "content": "</s>"}
    vocab = {("</s>" if t == END_OF_TEXT else t): i for t, i in body["model"]["vocab"].items()}
    model = {**body["model"], "vocab": vocab}
    path = saved(tokenizer, tmp_path / "s.json", added_tokens=[token], model=model)
    assert TextTokenizer.from_file(path).end_of_text_token == "</s>"
    assert TextTokenizer.from_file(path, "a").end_of_text_token == "a"
    with pytest.raises(InputError, match=r's\.json: has no token "<eot>"; give another --end-of'):
        TextTokenizer.from_file(path, "<eot>")
    vocab = {("unheard-of" if t == "</s>" else t): i for t, i in vocab.items()}
    path = saved(
        tokenizer, tmp_path / "n.json", added_tokens=[], model={**body["model"], "vocab": vocab}
    )
    with pytest.raises(InputError, match=r"n\.json: .* name one with --end-of-text"):
        TextTokenizer.from_file(path)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no tokenizer.json"),
        (b"{}", "no tokenizer.json"),
        (b"[1, 2", "no tokenizer.json"),
        (b"\x1f\x8bxyz", "gzip data, unpack it"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_is_what_is_no_tokenizer_refused(data: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data)
    with pytest.raises(InputError, match=reason) as caught:
        TextTokenizer.from_file(path)
    assert str(path) in str(caught.value)


def test_is_a_missing_tokenizer_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"t\.json: cannot be read \(No such file"):
        TextTokenizer.from_file(tmp_path / "t.json")


def test_is_an_error_of_the_text_not_lost_in_training() -> None:
    def texts() -> object:
        yield TEXT
        raise InputError("the text broke off")

    with pytest.raises(InputError, match="the text broke off"):
        TextTokenizer.trained(texts(), 300)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "vocab_size", "end"),
    [
        ("gpt2-50257", 50_257, "<|endoftext|>"),
        ("smollm2-49152", 49_152, "<|endoftext|>"),
        ("mistral-32000", 32_000, "</s>"),
        ("claude-65000", 65_000, "<EOT>"),
    ],
)
def test_are_published_tokenizers_taken(
    name: str, vocab_size: int, end: str, shared_data: Path
) -> None:
    path = shared_data / "tokenizers" / name / "tokenizer.json"
    published = TextTokenizer.from_file(path)
    assert (published.vocab_size, published.end_of_text_token) == (vocab_size, end)
    text = f"Once upon a time, a cat said 12 words: {end} naïve 猫."
    ids = ids_of(published, text)
    assert published.end_of_text_id not in ids
    assert published.decode(ids).strip() == text
