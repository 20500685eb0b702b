"""Do pieces, tokens and ends of an answer belong together?"""

from __future__ import annotations

import pytest

from serve.choice import Choice, Piece
from serve.errors import ApiError
from serve.logprob_answers import chat_logprobs, completion_logprobs, finite, token_text
from serve.openai_answers import echoed_text
from serve.requests import Finished, TokenEvent
from serve.stop_strings import StopStrings
from serve.vocabulary import Vocabulary
from shardb.errors import ObjectCorruptError
from tests.support.byte_model import byte_tokenizer, ids_of


@pytest.fixture(scope="module")
def words() -> Vocabulary:
    return Vocabulary(byte_tokenizer())


def run(
    words: Vocabulary, text: str | bytes, stops: list[str], end: Finished | None = None
) -> tuple[Choice, list[Piece]]:
    choice = Choice(0, words, StopStrings(stops))
    events = [TokenEvent(token_id=token, logprob=-1.0) for token in ids_of(text)]
    found = [choice.take(event) for event in (*events, end or Finished(reason="length"))]
    return choice, [piece for piece in found if piece is not None]


def told(pieces: list[Piece]) -> tuple[str, list[int]]:
    tokens = [said.event.token_id for piece in pieces for said in piece.tokens]
    return "".join(piece.text for piece in pieces), tokens


def test_is_every_token_told_once_and_in_order(words: Vocabulary) -> None:
    choice, pieces = run(words, "a猫b", ["bc"])
    assert told(pieces) == ("a猫b", ids_of("a猫b"))
    assert [piece.finish for piece in pieces] == [None, None, "length"]
    assert choice.token_count == 5


def test_are_tokens_of_a_stop_string_counted_and_not_told(words: Vocabulary) -> None:
    choice, pieces = run(words, "one STOP two", ["STOP"])
    assert told(pieces) == ("one ", ids_of("one "))
    assert (pieces[-1].finish, pieces[-1].ended_by) == ("stop", "STOP")
    assert choice.token_count == len("one STOP")


def test_is_held_text_said_at_the_end(words: Vocabulary) -> None:
    _, pieces = run(words, "one STO", ["STOP"], Finished(reason="stop", stop_token_id=0))
    assert told(pieces) == ("one STO", ids_of("one STO"))
    assert (pieces[-1].finish, pieces[-1].ended_by) == ("stop", 0)


@pytest.mark.parametrize(
    ("data", "text", "starts"),
    [
        (b"a\xe7b", "a\ufffdb", [0, 1, 2]),
        (b"\xe7\x8cbc", "\ufffdbc", [0, 0, 1, 2]),
        (b"\xe7\xe7\x8c\xabb", "\ufffd猫b", [0, 0, 1, 1, 2]),
        ("a猫b", "a猫b", [0, 1, 1, 1, 2]),
    ],
)
def test_does_a_token_start_where_its_own_text_does(
    words: Vocabulary, data: str | bytes, text: str, starts: list[int]
) -> None:
    _, pieces = run(words, data, [])
    assert "".join(piece.text for piece in pieces) == text
    assert [said.start for piece in pieces for said in piece.tokens] == starts
    assert echoed_text(words, ids_of(data)) == (starts, text)


def test_is_a_stop_string_after_half_a_character_not_told(words: Vocabulary) -> None:
    _, pieces = run(words, b"a\xe7stop", ["stop"])
    assert told(pieces) == ("a\ufffd", ids_of(b"a\xe7"))


def test_may_the_rest_of_a_character_end_the_text(words: Vocabulary) -> None:
    _, pieces = run(words, b"ab\xe7", ["\ufffd"])
    assert told(pieces)[0] == "ab"
    assert pieces[-1].finish == "stop"


def test_are_tokens_without_text_told(words: Vocabulary) -> None:
    choice = Choice(0, words, StopStrings([]))
    assert choice.take(TokenEvent(token_id=1, logprob=-1.0)) is None
    last = choice.take(Finished(reason="length"))
    assert last is not None
    assert [said.event.token_id for said in last.tokens] == [1]


def test_does_a_failure_come_out(words: Vocabulary) -> None:
    choice = Choice(0, words, StopStrings([]))
    with pytest.raises(ObjectCorruptError):
        choice.take(Finished(reason="error", error=ObjectCorruptError("bad")))
    with pytest.raises(ApiError, match="stopping"):
        choice.take(Finished(reason="cancelled"))


def test_how_tokens_are_written(words: Vocabulary) -> None:
    first, second = ids_of("é")
    assert token_text(words, first) == "bytes:\\xc3"
    assert token_text(words, ids_of("a")[0]) == "a"
    event = TokenEvent(token_id=first, logprob=float("-inf"), top=((second, -0.1), (first, -9.0)))
    _, pieces = run(words, "é", [])
    [said] = [said for piece in pieces for said in piece.tokens][:1]
    assert said.start == 0
    made = type(said)(event=event, start=3)
    chat = chat_logprobs(words, [made], 1)["content"][0]
    assert (chat["logprob"], chat["bytes"]) == (-9999.0, [0xC3])
    assert [other["token"] for other in chat["top_logprobs"]] == ["bytes:\\xa9"]
    plain = completion_logprobs(words, [made], 1, offset=10)
    assert plain["text_offset"] == [13]
    assert plain["top_logprobs"] == [{"bytes:\\xa9": -0.1, "bytes:\\xc3": -9999.0}]
    assert finite(float("nan")) == -9999.0
