"""Do characters come whole, once, and in every kind of vocabulary?"""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from serve.detokenize import Detokenizer
from serve.vocabulary import Vocabulary
from tests.support.byte_model import END_ID, byte_tokenizer, ids_of

TEXTS = ("plain", "naïve élève", "猫と犬", "a😀b", "👩‍👩‍👧", "\n\t x", "é" * 9, "")


@pytest.fixture(scope="module")
def byte_words() -> Vocabulary:
    return Vocabulary(byte_tokenizer())


def pieces(vocabulary: Vocabulary, ids: list[int], *, skip_special: bool = True) -> list[str]:
    detokenizer = Detokenizer(vocabulary, skip_special=skip_special)
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_are_characters_held_until_whole(byte_words: Vocabulary, text: str) -> None:
    found = pieces(byte_words, ids_of(text))
    assert "".join(found) == text
    assert "\ufffd" not in "".join(found)
    assert all(len(piece) <= 1 for piece in found)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"a\xc3", "a\ufffd"),
        (b"a\xc3b", "a\ufffdb"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"\xf0\x9f\x98", "\ufffd"),
        (b"\x80\x80\x80\xf0\x9f\x98\x80", "\ufffd\ufffd\ufffd😀"),
    ],
)
def test_what_is_no_character_becomes_a_replacement(
    byte_words: Vocabulary, data: bytes, text: str
) -> None:
    assert "".join(pieces(byte_words, ids_of(data))) == text


def test_are_control_tokens_left_out_unless_wanted(byte_words: Vocabulary) -> None:
    ids = [*ids_of("a"), END_ID, *ids_of("b")]
    assert "".join(pieces(byte_words, ids)) == "ab"
    assert "".join(pieces(byte_words, ids, skip_special=False)) == "a<|endoftext|>b"


def byte_fallback_words() -> tuple[Vocabulary, list[str]]:
    """A vocabulary in the manner of SentencePiece: spaces as ▁, unknown characters as bytes."""
    letters = ["<unk>", "▁", "▁the", "the", "a", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {text: number for number, text in enumerate(letters)}
    model = models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return Vocabulary(tokenizer.to_str().encode()), letters


def test_does_a_vocabulary_with_byte_fallback_work() -> None:
    vocabulary, letters = byte_fallback_words()
    cat = [letters.index(f"<0x{byte:02X}>") for byte in "猫".encode()]
    ids = [letters.index("▁the"), *cat, letters.index("é"), letters.index("▁the")]
    found = pieces(vocabulary, ids)
    assert found == [" the", "", "", "猫", "é", " the", ""]


def test_does_a_decoder_that_looks_at_neighbours_work() -> None:
    words = {"[UNK]": 0, "play": 1, "##ing": 2, "now": 3}
    tokenizer = Tokenizer(models.WordPiece(vocab=words, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    vocabulary = Vocabulary(tokenizer.to_str().encode())
    assert not vocabulary.is_bytewise
    assert "".join(pieces(vocabulary, [1, 2, 3, 1])) == tokenizer.decode([1, 2, 3, 1])


@pytest.mark.parametrize("name", ["gpt2-50257", "smollm2-49152"])
def test_are_real_vocabularies_decoded_as_their_library_does(shared_data: Path, name: str) -> None:
    data = (shared_data / "tokenizers" / name / "tokenizer.json").read_bytes()
    vocabulary, tokenizer = Vocabulary(data), Tokenizer.from_str(data.decode())
    for start in range(300, vocabulary.size - 40, vocabulary.size // 25):
        ids = [token for token in range(start, start + 40) if not vocabulary.is_special(token)]
        assert "".join(pieces(vocabulary, ids)) == tokenizer.decode(ids)
