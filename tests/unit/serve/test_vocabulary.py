"""Does what a user typed stay text, and is there one beginning of text at most?"""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, processors

from serve.errors import ApiError
from serve.vocabulary import BREAKER, Vocabulary, check_text
from tests.support.byte_model import BEGIN_ID, END_ID, SPECIAL, byte_tokenizer, ids_of


@pytest.fixture(scope="module")
def words() -> Vocabulary:
    return Vocabulary(byte_tokenizer(), begin_id=BEGIN_ID)


@pytest.mark.parametrize("typed", SPECIAL)
def test_do_typed_control_tokens_stay_text(words: Vocabulary, typed: str) -> None:
    assert words.encode_text(f"a{typed}b") == ids_of(f"a{typed}b")
    assert words.encode_marked(words.break_control(f"a{typed}b")) == ids_of(f"a{typed}b")


def test_control_the_templates_own_are_control_tokens(words: Vocabulary) -> None:
    text = f"{SPECIAL[1]}user\n{words.break_control(SPECIAL[2])}{SPECIAL[2]}"
    assert words.encode_marked(text) == [1, *ids_of("user\n" + SPECIAL[2]), 2]
    assert words.encode_marked(f"x{SPECIAL[0]}") == [*ids_of("x"), END_ID]


def test_can_a_user_not_type_the_breaker(words: Vocabulary) -> None:
    typed = SPECIAL[0][:1] + BREAKER + SPECIAL[0][1:]
    assert END_ID not in words.encode_marked(words.break_control(typed))
    assert words.encode_marked(words.break_control("a" + BREAKER)) == ids_of("a")


def test_is_a_text_begun_once(words: Vocabulary) -> None:
    assert words.encode_text("a", begin=True) == [BEGIN_ID, *ids_of("a")]
    assert words.encode_text("a") == ids_of("a")
    assert Vocabulary(byte_tokenizer()).encode_text("a", begin=True) == ids_of("a")


def test_does_the_tokenizers_own_rule_go_first() -> None:
    tokenizer = Tokenizer.from_str(byte_tokenizer().decode())
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    words = Vocabulary(tokenizer.to_str().encode(), begin_id=BEGIN_ID)
    assert words.encode_text("a", begin=True) == [1, *ids_of("a")]


def test_is_a_tokenizers_truncation_undone() -> None:
    tokenizer = Tokenizer.from_str(byte_tokenizer().decode())
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    assert Vocabulary(tokenizer.to_str().encode()).encode_text("abcdef") == ids_of("abcdef")


def test_is_half_a_character_refused() -> None:
    assert check_text("é", "prompt") == "é"
    with pytest.raises(ApiError) as caught:
        check_text("\ud800", "prompt")
    assert (caught.value.status, caught.value.param) == (400, "prompt")
