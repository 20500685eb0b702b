"""Which text is held out: every document goes whole to train or to val, by a hash of its text.

Owns the rule and the one pass over the text that it needs. It does not know tokens.

Equal texts have equal hashes, so no text is in both splits, and the same text gives the same split
whatever the order of the files. The hash is xxh3-64 of the white-space-folded, case-folded first
piece. A document goes to val when its hash is among the lowest `val_fraction` of all hashes. Where
that leaves val with less than half of its share, the limit is raised document by document. Where a
text has too few documents for that, or one that is most of it (a single book, running text without
separators), every document gives its end to val instead, cut at a paragraph. Either way there is
always a val split.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import xxhash

from trainer.data.readers import Piece

DOCUMENTS_MIN: Final = 10
"""With fewer different documents than this, documents are cut rather than drawn."""

_LOWEST_KEPT_MAX = 4096
_HASH_RANGE = 1 << 64


class Part(NamedTuple):
    """Text for one split; `last` ends a document there."""

    split: str
    text: str
    last: bool


class Splitter(Protocol):
    """Sends the pieces of documents to splits."""

    @property
    def name(self) -> str:
        """How the split is made, for the manifest."""

    @property
    def dropped_documents(self) -> int:
        """Documents of the last pass that went nowhere."""

    def parts(self, pieces: Iterable[Piece]) -> Iterator[Part]:
        """Yield every piece, or parts of it, with the split it belongs to."""


def document_hash(text: str, seed: int) -> int:
    """Return the hash of a document's first piece that decides its split."""
    folded = " ".join(text.split()).casefold()
    return xxhash.xxh3_64_intdigest(folded.encode(), seed=seed % _HASH_RANGE)


@dataclass(kw_only=True)
class Scan:
    """What one pass over the text found: sizes in characters, and the lowest hashes with theirs."""

    val_fraction: float
    documents: int = 0
    characters: int = 0
    val_characters: int = 0
    sizes: dict[int, int] = field(default_factory=dict)
    shortest: dict[int, int] = field(default_factory=dict)
    _highest_kept: list[int] = field(default_factory=list)

    @property
    def hash_limit(self) -> int:
        return int(self.val_fraction * _HASH_RANGE)

    def add(self, hash_value: int, characters: int) -> None:
        """Take in one document. Memory is bounded: only the lowest hashes are kept."""
        self.documents += 1
        self.characters += characters
        if hash_value < self.hash_limit:
            self.val_characters += characters
        if hash_value in self.sizes:
            self.sizes[hash_value] += characters
            self.shortest[hash_value] = min(self.shortest[hash_value], characters)
        elif len(self.sizes) < _LOWEST_KEPT_MAX or hash_value < -self._highest_kept[0]:
            self.sizes[hash_value] = self.shortest[hash_value] = characters
            heapq.heappush(self._highest_kept, -hash_value)
            if len(self.sizes) > _LOWEST_KEPT_MAX:
                dropped = -heapq.heappop(self._highest_kept)
                del self.sizes[dropped], self.shortest[dropped]


def scan_documents(pieces: Iterable[Piece], seed: int, scan: Scan) -> None:
    """Take every document of a pass into `scan`."""
    hash_value = characters = 0
    for piece in pieces:
        if piece.first:
            hash_value, characters = document_hash(piece.text, seed), 0
        characters += len(piece.text)
        if piece.last:
            scan.add(hash_value, characters)


@dataclass(frozen=True, kw_only=True)
class HashSplitter:
    """Documents whose hash is below the limit go to val."""

    limit: int
    seed: int
    name: str = "document hash"
    dropped_documents: int = 0

    def parts(self, pieces: Iterable[Piece]) -> Iterator[Part]:
        split = ""
        for piece in pieces:
            if piece.first:
                is_val = document_hash(piece.text, self.seed) < self.limit
                split = "val" if is_val else "train"
            yield Part(split, piece.text, piece.last)


@dataclass(frozen=True, kw_only=True)
class TailSplitter:
    """The end of every document goes to val; `cuts` tells, by hash, after how many characters."""

    cuts: Mapping[int, int]
    seed: int
    name: str = "document tails"
    dropped_documents: int = 0

    def parts(self, pieces: Iterable[Piece]) -> Iterator[Part]:
        at = cut = 0
        for piece in pieces:
            if piece.first:
                hash_value = document_hash(piece.text, self.seed)
                at, cut = 0, self.cuts.get(hash_value, sys.maxsize)
            end = at + len(piece.text)
            if at < cut <= end:
                place = paragraph_end(piece.text, cut - at)
                yield Part("train", piece.text[:place], True)
                if place < len(piece.text):
                    yield Part("val", piece.text[place:], piece.last)
            else:
                yield Part("train" if end <= cut else "val", piece.text, piece.last)
            at = end


@dataclass(kw_only=True)
class WholeSplitter:
    """Everything goes to one split, but for documents whose hash the other split has."""

    split: str
    seed: int
    elsewhere: frozenset[int] = frozenset()
    name: str = "separate files"
    dropped_documents: int = 0

    def parts(self, pieces: Iterable[Piece]) -> Iterator[Part]:
        is_dropped, self.dropped_documents = False, 0
        for piece in pieces:
            if piece.first:
                is_dropped = document_hash(piece.text, self.seed) in self.elsewhere
                self.dropped_documents += is_dropped
            if not is_dropped:
                yield Part(self.split, piece.text, piece.last)


def paragraph_end(text: str, at: int) -> int:
    """Return the first end of a paragraph, line or word at or after `at`, if one is near."""
    most = at + (len(text) - at) // 2
    for mark in ("\n\n", "\n", " "):
        place = text.find(mark, at, most)
        if place >= 0:
            return place + len(mark)
    return at


def choose_splitter(scan: Scan, seed: int) -> HashSplitter | TailSplitter:
    """Decide by what the scan found: draw documents where that gives val about its share."""
    if len(scan.sizes) < DOCUMENTS_MIN:
        return _tail_splitter(scan, seed)
    share = scan.val_fraction * scan.characters
    least, most = share / 2, min(4 * share, scan.characters / 2)
    if least <= scan.val_characters <= most:
        return HashSplitter(limit=scan.hash_limit, seed=seed)
    characters = limit = 0
    for hash_value in sorted(scan.sizes):
        characters += scan.sizes[hash_value]
        limit = hash_value + 1
        if characters >= least:
            break
    # One document may be more than the share of val, but not one far above the others.
    most = min(4 * max(share, scan.characters / scan.documents), scan.characters / 2)
    if least <= characters <= most:
        return HashSplitter(limit=limit, seed=seed)
    return _tail_splitter(scan, seed)


def _tail_splitter(scan: Scan, seed: int) -> TailSplitter:
    cuts = {
        hash_value: max(1, int(characters * (1 - scan.val_fraction)))
        for hash_value, characters in scan.shortest.items()
    }
    return TailSplitter(cuts=cuts, seed=seed)
