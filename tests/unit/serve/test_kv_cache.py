"""Are pages given out once, found by their text alone, and taken back in the right order?"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.kv_cache import CacheGeometry, PagedCache, page_names
from shardb.errors import UsageError

GEOMETRY = CacheGeometry(layers=2, key_heads=2, head_dim=4, page_tokens=16, dtype=torch.float32)


def cache(pages: int) -> PagedCache:
    return PagedCache(GEOMETRY, (pages + 1) * GEOMETRY.page_bytes, torch.device("cpu"))


def test_gives_out_every_page_but_the_one_of_zeros() -> None:
    pages = cache(5)
    assert pages.take(6) is None
    taken = pages.take(5)
    assert taken is not None
    assert sorted(taken) == [1, 2, 3, 4, 5]
    assert pages.take(1) is None
    pages.give_back(taken[:2])
    assert pages.available_count == 2


def test_a_page_given_out_anew_holds_zero_values() -> None:
    pages = cache(1)
    [page] = pages.take(1) or []
    pages.values_LGPSK[:, :, page] = torch.nan
    pages.give_back([page])
    assert pages.take(1) == [page]
    assert not pages.values_LGPSK.any()


def test_finds_the_longest_known_beginning_of_the_same_commit() -> None:
    pages = cache(4)
    text = list(range(48))
    names = page_names("a" * 32, text, 16)
    taken = pages.take(3) or []
    for page, name in zip(taken, names, strict=True):
        pages.name_page(page, name)
    pages.give_back(taken)
    assert pages.find(names) == taken
    assert pages.find(page_names("a" * 32, [*text[:32], *text[:16]], 16)) == taken[:2]
    assert pages.find(page_names("a" * 32, [9, *text[1:]], 16)) == []
    assert pages.find(page_names("b" * 32, text, 16)) == [], "another commit's values"


def test_gives_the_end_of_an_old_text_up_first_and_never_what_is_held() -> None:
    pages = cache(4)
    names = page_names("a", list(range(64)), 16)
    taken = pages.take(4) or []
    for page, name in zip(taken, names, strict=True):
        pages.name_page(page, name)
    pages.give_back(taken)
    held = pages.find(names[:1])
    assert pages.take(1) == [taken[3]]
    assert pages.take(2) == [taken[2], taken[1]]
    assert pages.take(1) is None
    assert pages.find(names) == held


def test_a_text_keeps_the_page_it_has() -> None:
    pages = cache(3)
    [first, second] = pages.take(2) or []
    pages.name_page(first, b"text")
    pages.name_page(second, b"text")
    pages.give_back([first, second])
    assert pages.find([b"text"]) == [first]
    pages.give_back([first])
    pages.forget_idle()
    assert pages.find([b"text"]) == []


def test_refuses_a_budget_without_a_page() -> None:
    with pytest.raises(UsageError, match=r"kv_cache_bytes is 10\b"):
        PagedCache(GEOMETRY, 10, torch.device("cpu"))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "back", "find"]), st.integers(0, 5))))
def test_no_page_is_ever_held_by_two_texts(acts: list[tuple[str, int]]) -> None:
    pages = cache(6)
    held: list[tuple[int, list[int]]] = []
    for act, number in acts:
        names = page_names("a", [number] * 48, 16)
        if act == "take" and (taken := pages.take(number % 3 + 1)) is not None:
            for page, name in zip(taken, names, strict=False):
                pages.name_page(page, name)
            held.append((number, taken))
        elif act == "find":
            held.append((number, pages.find(names)))
        elif act == "back" and held:
            pages.give_back(held.pop(number % len(held))[1])
        owners: dict[int, int] = {}
        for text, some in held:
            assert all(owners.setdefault(page, text) == text for page in some)
        assert 0 not in owners
        assert pages.used_bytes == len(owners) * GEOMETRY.page_bytes
    assert pages.available_count == 6 - len({page for _, some in held for page in some})
