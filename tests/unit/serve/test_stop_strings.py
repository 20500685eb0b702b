"""Are stop strings found wherever tokens are cut, and never said?"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.stop_strings import StopStrings

LETTERS = st.text(alphabet="ab", max_size=24)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3)


def said(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[str, str | None]:
    held = StopStrings(stops, include=include)
    text = "".join([held.push(piece) for piece in pieces])
    return (text if held.hit is not None else text + held.finish()), held.hit


def expected(text: str, stops: list[str]) -> str:
    """The text up to the stop string that is complete first."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@given(LETTERS, STOPS, st.data())
def test_is_the_text_the_same_however_it_is_cut(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert said(pieces, stops)[0] == said(list(text), stops)[0] == expected(text, stops)


@given(LETTERS, STOPS)
def test_is_nothing_said_that_must_be_taken_back(text: str, stops: list[str]) -> None:
    held, so_far = StopStrings(stops), ""
    for letter in text:
        so_far += held.push(letter)
        assert expected(text, stops).startswith(so_far)


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "hit"),
    [
        (["hello"], ["lo"], "hel", "lo"),
        (["hel", "lo"], ["ll"], "he", "ll"),
        (["a", "b", "c"], ["abc"], "", "abc"),
        (["ab", "ax"], ["abab"], "abax", None),
        (["abc"], ["abcd", "bc"], "a", "bc"),
        (["x"], [], "x", None),
    ],
)
def test_which_one_ends_the_text(
    pieces: list[str], stops: list[str], text: str, hit: str | None
) -> None:
    assert said(pieces, stops) == (text, hit)


def test_can_the_stop_string_be_kept() -> None:
    assert said(["one tw", "o three"], ["two"], include=True) == ("one two", "two")


def test_is_nothing_said_after_a_hit() -> None:
    held = StopStrings(["x"])
    assert held.push("ax") == "a"
    assert held.push("more") == ""
    assert held.finish() == ""
