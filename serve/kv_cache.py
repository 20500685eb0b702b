"""Keys and values of past tokens, in pages that requests with a common beginning share.

Owns the pages of one geometry: who holds them, what beginning of a text they are, which are given
up first. Knows nothing of requests. Invariants: a page is written by one request, before it is
known by its text; the name of a text holds the commit, so that values of other weights are never
found; page 0 holds zeros and belongs to nobody; a page given out anew holds zeros as values, for a
masked value that is not finite would not be masked.

Shapes: L layers, G key heads, P pages, S tokens a page, K head width.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardb.errors import UsageError

PageName = bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheGeometry:
    """What a page holds."""

    layers: int
    key_heads: int
    head_dim: int
    page_tokens: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        """Give the bytes of keys and values of one page."""
        values = self.layers * self.key_heads * self.page_tokens * self.head_dim
        return 2 * values * self.dtype.itemsize


class PagedCache:
    """Pages of one geometry within a budget of bytes."""

    def __init__(self, geometry: CacheGeometry, budget_bytes: int, device: torch.device) -> None:
        self.geometry = geometry
        self.page_count = budget_bytes // geometry.page_bytes
        if self.page_count < 2:
            raise UsageError(
                f"kv_cache_bytes is {budget_bytes}: a page of {geometry.page_tokens} tokens of this"
                f" model takes {geometry.page_bytes}: give at least {2 * geometry.page_bytes}"
            )
        shape = (
            geometry.layers,
            geometry.key_heads,
            self.page_count,
            geometry.page_tokens,
            geometry.head_dim,
        )
        # Zeros that nobody wrote to take no memory on the host.
        self.keys_LGPSK = torch.zeros(shape, dtype=geometry.dtype, device=device)
        self.values_LGPSK = torch.zeros(shape, dtype=geometry.dtype, device=device)
        self._untouched = 1
        self._free: list[int] = []
        self._holders: dict[int, int] = {}
        self._names: dict[int, PageName] = {}
        self._named: dict[PageName, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available_count(self) -> int:
        """Count the pages that can be given out, known but unused ones included."""
        return len(self._free) + self.page_count - self._untouched + len(self._idle)

    @property
    def used_bytes(self) -> int:
        """Give the bytes of pages that somebody holds."""
        return len(self._holders) * self.geometry.page_bytes

    def take(self, count: int) -> list[int] | None:
        """Give out `count` pages with zero values; None, and no page, where there are too few."""
        if count > self.available_count:
            return None
        pages = [self._take_one() for _ in range(count)]
        if pages:
            index = torch.tensor(pages, device=self.values_LGPSK.device)
            self.values_LGPSK.index_fill_(2, index, 0)
        return pages

    def give_back(self, pages: Sequence[int]) -> None:
        """Hold pages no longer; those with a name stay until their memory is needed.

        Later pages of a text go before earlier ones, without which they are worth nothing.
        """
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            if page in self._names:
                self._idle[page] = None
            else:
                self._free.append(page)

    def find(self, names: Sequence[PageName]) -> list[int]:
        """Hold the pages of the longest known beginning and give them."""
        pages: list[int] = []
        for name in names:
            page = self._named.get(name)
            if page is None:
                break
            self._holders[page] = self._holders.get(page, 0) + 1
            self._idle.pop(page, None)
            pages.append(page)
        return pages

    def name_page(self, page: int, name: PageName) -> None:
        """Say which text a full page is the end of; a text that has a page keeps that one."""
        assert page in self._holders, "only its holder knows what a page holds"
        if name not in self._named and page not in self._names:
            self._named[name] = page
            self._names[page] = name

    def forget_idle(self) -> None:
        """Give up every page that nobody holds, and with it what it was known for."""
        while self._idle:
            self._free.append(self._evict())

    def _take_one(self) -> int:
        if self._free:
            page = self._free.pop()
        elif self._untouched < self.page_count:
            page = self._untouched
            self._untouched += 1
        else:
            page = self._evict()
        self._holders[page] = 1
        return page

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        del self._named[self._names.pop(page)]
        return page


def page_names(commit: str, ids: Sequence[int], page_tokens: int) -> list[PageName]:
    """Name every full page of a text: by its commit, its own tokens and all before them."""
    name = hashlib.blake2b(commit.encode(), digest_size=16).digest()
    names = []
    for start in range(0, len(ids) - page_tokens + 1, page_tokens):
        tokens = array("q", ids[start : start + page_tokens]).tobytes()
        name = hashlib.blake2b(name + tokens, digest_size=16).digest()
        names.append(name)
    return names
