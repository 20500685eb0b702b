"""Is there always a held-out part, is it about the share asked for, and is no text in both?"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data import split as split_module
from trainer.data.readers import Piece, document_pieces
from trainer.data.split import (
    HashSplitter,
    Scan,
    Splitter,
    TailSplitter,
    WholeSplitter,
    choose_splitter,
    document_hash,
    paragraph_end,
    scan_documents,
)


def pieces_of(documents: Sequence[str]) -> Iterator[Piece]:
    for document in documents:
        yield from document_pieces(document)


def chosen(documents: Sequence[str], val_fraction: float, seed: int = 0) -> Splitter:
    scan = Scan(val_fraction=val_fraction)
    scan_documents(pieces_of(documents), seed, scan)
    assert scan.documents == len(documents)
    return choose_splitter(scan, seed)


def divided(
    documents: Sequence[str], val_fraction: float = 0.05, seed: int = 0
) -> dict[str, list[str]]:
    return parted(chosen(documents, val_fraction, seed), documents)


def parted(splitter: Splitter, documents: Sequence[str]) -> dict[str, list[str]]:
    """Put the parts of each split together again, document by document."""
    found: dict[str, list[str]] = {"train": [], "val": []}
    is_open = {"train": False, "val": False}
    for part in splitter.parts(pieces_of(documents)):
        texts = found[part.split]
        if is_open[part.split]:
            texts[-1] += part.text
        else:
            texts.append(part.text)
        is_open[part.split] = not part.last
    assert not any(is_open.values())
    return found


def stories(count: int, seed: int = 1, longest: int = 200) -> list[str]:
    draw = random.Random(seed)
    return [f"story {number} " + "word " * draw.randrange(1, longest) for number in range(count)]


def test_does_a_large_set_give_val_its_share() -> None:
    documents = stories(4000)
    found = divided(documents, 0.1)
    assert sorted(found["train"] + found["val"]) == sorted(documents)
    assert 0.08 < sum(map(len, found["val"])) / sum(map(len, documents)) < 0.12


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 60),
    seed=st.integers(0, 50),
    fraction=st.sampled_from([0.01, 0.05, 0.1, 0.3, 0.5]),
    longest=st.sampled_from([2, 50, 2000]),
)
def test_is_there_always_a_val_split_that_shares_nothing(
    count: int, seed: int, fraction: float, longest: int
) -> None:
    documents = stories(count, seed, longest)
    found = divided(documents, fraction, seed)
    total = sum(map(len, documents))
    val = sum(map(len, found["val"]))
    assert sum(map(len, found["train"])) + val == total
    assert 0 < val <= total / 2 + count
    assert not set(found["train"]) & set(found["val"])
    assert all(any(part in document for document in documents) for part in found["val"])


def test_do_equal_texts_go_together_whatever_their_white_space_and_case() -> None:
    documents = stories(200)
    copies = [document.upper().replace(" ", "\n ") for document in documents]
    found = divided([*documents, *copies], 0.2)
    val = {" ".join(text.split()).casefold() for text in found["val"]}
    train = {" ".join(text.split()).casefold() for text in found["train"]}
    assert val
    assert not val & train
    assert len(found["val"]) == 2 * len(val)


def test_does_the_order_of_documents_not_matter_but_the_seed() -> None:
    documents = stories(400)
    shuffled = random.Random(5).sample(documents, len(documents))
    val = set(divided(documents)["val"])
    assert val == set(divided(shuffled)["val"])
    assert val != set(divided(documents, seed=1)["val"])


def test_does_one_document_give_its_end_cut_at_a_paragraph() -> None:
    text = "\n\n".join(f"Paragraph {number}. " + "word " * 30 for number in range(200))
    splitter = chosen([text], 0.1)
    assert isinstance(splitter, TailSplitter)
    found = parted(splitter, [text])
    assert found["train"][0] + found["val"][0] == text
    assert found["val"][0].startswith("Paragraph ")
    assert 0.07 < len(found["val"][0]) / len(text) <= 0.1


def test_is_a_document_of_many_pieces_cut_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.readers.PIECE_CHARACTERS_MAX", 50)
    text = " ".join(f"w{number}" for number in range(500))
    found = divided([text, text + " end"], 0.25)
    assert [a + b for a, b in zip(found["train"], found["val"], strict=True)] == [
        text,
        text + " end",
    ]
    assert all(len(part) <= 0.25 * len(text) + 5 for part in found["val"])


def test_is_a_set_with_one_giant_not_held_out_by_half() -> None:
    for seed in range(20):
        documents = [*stories(15, seed), "giant " * 20_000]
        found = divided(documents, 0.05, seed)
        total = sum(map(len, documents))
        assert 0.02 * total < sum(map(len, found["val"])) < 0.25 * total


def test_is_the_limit_raised_where_hashes_leave_val_empty() -> None:
    documents = stories(40, longest=4)
    low = min(document_hash(document, 0) for document in documents) / 2**64
    splitter = chosen(documents, low * 0.9)
    assert isinstance(splitter, HashSplitter)
    assert len(parted(splitter, documents)["val"]) == 1


def test_do_copies_of_one_text_not_count_as_many() -> None:
    found = divided(["the same text of some words, over and over"] * 50, 0.1)
    assert len(found["train"]) == len(found["val"]) == 50


def test_does_a_scan_keep_only_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_module, "_LOWEST_KEPT_MAX", 20)
    documents = stories(3000)
    scan = Scan(val_fraction=0.1)
    scan_documents(pieces_of(documents), 0, scan)
    assert len(scan.sizes) == len(scan.shortest) == 20
    assert sorted(scan.sizes) == sorted(document_hash(d, 0) for d in documents)[:20]


def test_are_documents_of_the_other_files_left_out() -> None:
    documents = stories(10)
    elsewhere = frozenset(document_hash(document.upper(), 0) for document in documents[:3])
    splitter = WholeSplitter(split="train", seed=0, elsewhere=elsewhere)
    for _ in range(2):
        assert parted(splitter, documents)["train"] == documents[3:]
        assert splitter.dropped_documents == 3


@pytest.mark.parametrize(
    ("text", "at", "place"),
    [
        ("aa aa\n\nbb bb\nbb bb bb bb", 0, 7),
        ("aa aa\nbb bb bb bb", 0, 6),
        ("aa bb cc dd", 4, 6),
        ("aaaaaaaa", 4, 4),
        ("a b", 2, 2),
        ("a b ", 3, 3),
        ("ab", 2, 2),
    ],
)
def test_is_a_cut_near_and_at_the_best_mark(text: str, at: int, place: int) -> None:
    assert paragraph_end(text, at) == place
