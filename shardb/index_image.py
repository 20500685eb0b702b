"""Read the bytes of an LMDB data file without liblmdb: a damaged one must not kill the process.

liblmdb maps its file and believes it: a truncated or scribbled one ends in SIGBUS, SIGSEGV or an
abort, not in an error. This reader checks every number before it uses it. It owns the on-disk
layout of LMDB 0.9 (data version 1, native byte order, 64-bit), as far as the index uses it: named
databases of unique, byte-ordered keys. It knows nothing of what the index means.

Invariants: an image that `read_image` accepts has sound page numbers, page kinds, key order, counts
and free list, so liblmdb may map it for reading and for writing. No page is read twice, so work and
memory are bounded by the size of the image; nothing recurses. The bytes must be taken while nobody
commits to the index.

What it cannot notice, because the format has no checksums: changed bytes inside a value, a changed
key that keeps its place in the order, and an older image that was whole in its time. The caller
guards against the last with `applied_lsn`, against the others by checking what the values mean.

Source of the layout: the structures MDB_page, MDB_node, MDB_meta and MDB_db in liblmdb's mdb.c.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

MAGIC = 0xBEEFC0DE
DATA_VERSION = 1
NO_PAGE = 0xFFFF_FFFF_FFFF_FFFF
KEY_BYTES_MAX = 511
DEPTH_MAX = 32
PAGE_BYTES_ALLOWED = tuple(1 << shift for shift in range(9, 16))

_BRANCH, _LEAF, _OVERFLOW, _META = 0x01, 0x02, 0x04, 0x08
_IN_OVERFLOW, _IS_DATABASE, _HAS_DUPLICATES = 0x01, 0x02, 0x04
_INTEGER_KEYS = 0x08

_PAGE_HEADER = struct.Struct("=QHHHH")  # page number, padding, kind, lower, upper
_NODE_HEADER = struct.Struct("=HHHH")  # size or page: low, high; flags; key bytes
_META_HEAD = struct.Struct("=IIQQ")  # magic, version, address, map bytes
_TREE = struct.Struct("=IHHQQQQQ")  # padding, flags, depth, branch, leaf, overflow, entries, root
_META_TAIL = struct.Struct("=QQ")  # last page number, transaction id
_META_BYTES = _META_HEAD.size + 2 * _TREE.size + _META_TAIL.size
_NUMBER = struct.Struct("=Q")


class ImageError(Exception):
    """The bytes are not a sound LMDB data file: `reason`, at byte `offset`."""

    def __init__(self, reason: str, offset: int) -> None:
        super().__init__(f"{reason} (at byte {offset})")
        self.reason = reason
        self.offset = offset


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tree:
    """One B-tree as its record describes it; the counts are of pages and of entries."""

    offset: int
    flags: int
    depth: int
    branch_count: int
    leaf_count: int
    overflow_count: int
    entry_count: int
    root: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Meta:
    """One of the two meta pages."""

    offset: int
    page_bytes: int
    map_bytes: int
    free: _Tree
    main: _Tree
    last_page: int
    transaction_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """One key of a leaf page, its value and where its node starts."""

    offset: int
    flags: int
    key: bytes
    value: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class _Visit:
    """A page still to be read: its level below the root (1 is the root) and its keys' bounds."""

    page: int
    level: int
    first_key: bytes | None
    end_key: bytes | None


def read_image(data: bytes) -> dict[str, dict[bytes, bytes]]:
    """Read every named database of an image; plain entries of the main database go under `""`.

    Raises ImageError for whatever liblmdb could stumble over and for what the index never uses
    (duplicate keys, integer keys, reversed keys).
    """
    meta = _newest_meta(data)
    reader = _Reader(data, meta)
    databases: dict[str, dict[bytes, bytes]] = {}
    for entry in reader.entries(meta.main):
        if entry.flags & _IS_DATABASE:
            name = _database_name(entry)
            tree = _parse_tree(entry.value, 0, entry.offset)
            databases[name] = {item.key: item.value for item in reader.plain_entries(tree)}
        else:
            databases.setdefault("", {})[entry.key] = entry.value
    reader.check_free_pages(meta)
    return databases


def _fail(reason: str, offset: int) -> NoReturn:
    raise ImageError(reason, offset)


def _newest_meta(data: bytes) -> _Meta:
    """Check both meta pages, as liblmdb does, and give the one of the later transaction."""
    first = _parse_meta(data, 0)
    second = _parse_meta(data, first.page_bytes)
    if second.page_bytes != first.page_bytes:
        _fail("the meta pages disagree on the page size", second.offset)
    return second if second.transaction_id > first.transaction_id else first


def _parse_meta(data: bytes, offset: int) -> _Meta:
    body = offset + _PAGE_HEADER.size
    if body + _META_BYTES > len(data):
        _fail("the file ends inside a meta page", len(data))
    _, _, kind, _, _ = _PAGE_HEADER.unpack_from(data, offset)
    if kind & 0x7FFF != _META:
        _fail(f"not a meta page (kind {kind:#x})", offset)
    magic, version, _, map_bytes = _META_HEAD.unpack_from(data, body)
    if magic != MAGIC or version != DATA_VERSION:
        _fail(f"magic {magic:#x}, data version {version}", body)
    trees_at = body + _META_HEAD.size
    page_bytes = _TREE.unpack_from(data, trees_at)[0]
    if page_bytes not in PAGE_BYTES_ALLOWED:
        _fail(f"page size {page_bytes}", trees_at)
    last_page, transaction_id = _META_TAIL.unpack_from(data, trees_at + 2 * _TREE.size)
    return _Meta(
        offset=offset,
        page_bytes=page_bytes,
        map_bytes=map_bytes,
        free=_parse_tree(data, trees_at, trees_at),
        main=_parse_tree(data, trees_at + _TREE.size, trees_at + _TREE.size),
        last_page=last_page,
        transaction_id=transaction_id,
    )


def _parse_tree(data: bytes, start: int, offset: int) -> _Tree:
    """Parse the record of a tree at `data[start:]`; errors name byte `offset` of the image."""
    if start + _TREE.size > len(data):
        _fail(f"the record of a database has {len(data) - start} bytes", offset)
    fields = _TREE.unpack_from(data, start)
    flags, depth, branch, leaf, overflow, entries, root = fields[1:]
    if depth > DEPTH_MAX:
        _fail(f"a tree of depth {depth}", offset)
    return _Tree(
        offset=offset,
        flags=flags,
        depth=depth,
        branch_count=branch,
        leaf_count=leaf,
        overflow_count=overflow,
        entry_count=entries,
        root=root,
    )


def _database_name(entry: _Entry) -> str:
    try:
        return entry.key.decode("utf-8")
    except UnicodeDecodeError:
        _fail("the name of a database is not UTF-8", entry.offset)


class _Reader:
    """Walks the trees of one image and remembers which pages it has seen."""

    def __init__(self, data: bytes, meta: _Meta) -> None:
        self.data = data
        self.page_bytes = meta.page_bytes
        self.seen: set[int] = {0, 1}
        self.page_count = min(len(data) // meta.page_bytes, meta.last_page + 1)
        # Pages allocated and freed in one transaction are never written, so the file may end
        # before the last page; what ends there must be free, which the walk proves.
        pages_max = max(len(data), meta.map_bytes) // meta.page_bytes
        if not 1 <= meta.last_page < pages_max:
            _fail(f"last page {meta.last_page} of at most {pages_max}", meta.offset)

    def plain_entries(self, tree: _Tree) -> Iterator[_Entry]:
        """The entries of a named database: no database lies inside it."""
        for entry in self.entries(tree):
            if entry.flags & _IS_DATABASE:
                _fail("a database inside a named database", entry.offset)
            yield entry

    def entries(self, tree: _Tree, *, integer_keys: bool = False) -> Iterator[_Entry]:
        """All entries in key order; checks the tree's shape and counts on the way."""
        if tree.flags != (_INTEGER_KEYS if integer_keys else 0):
            _fail(f"a database with flags {tree.flags:#x}", tree.offset)
        if tree.root == NO_PAGE:
            if tree.depth or tree.entry_count:
                _fail("a database with entries and no root page", tree.offset)
            return
        counts = {_BRANCH: 0, _LEAF: 0, _OVERFLOW: 0}
        entry_count = 0
        stack = [_Visit(page=tree.root, level=1, first_key=None, end_key=None)]
        while stack:
            visit = stack.pop()
            kind = _LEAF if visit.level == tree.depth else _BRANCH
            offset = self._claim(visit.page, kind, tree.offset)
            counts[kind] += 1
            nodes = self._nodes(offset)
            if kind == _BRANCH:
                stack.extend(reversed(self._children(nodes, visit, integer_keys)))
                continue
            for entry in self._leaf(nodes, visit, counts, integer_keys):
                entry_count += 1
                yield entry
        found = (counts[_BRANCH], counts[_LEAF], counts[_OVERFLOW], entry_count)
        told = (tree.branch_count, tree.leaf_count, tree.overflow_count, tree.entry_count)
        if found != told:
            _fail(f"pages and entries are {found}, recorded are {told}", tree.offset)

    def check_free_pages(self, meta: _Meta) -> None:
        """Check the free list: liblmdb would overwrite a live page that is listed as free."""
        free: set[int] = set()
        for entry in self.entries(meta.free, integer_keys=True):
            if len(entry.key) != 8 or _NUMBER.unpack(entry.key)[0] > meta.transaction_id:
                _fail("a free list of a transaction that is not there yet", entry.offset)
            free.update(self._free_pages(entry, meta.last_page, free))
        if not free.isdisjoint(self.seen):
            _fail(f"page {min(free & self.seen)} is in use and listed as free", meta.offset)

    def _free_pages(self, entry: _Entry, last_page: int, known: set[int]) -> tuple[int, ...]:
        count = _NUMBER.unpack_from(entry.value)[0] if len(entry.value) >= 8 else 0
        if len(entry.value) < 8 or count > len(entry.value) // 8 - 1:
            _fail("a free list longer than its entry", entry.offset)
        pages: tuple[int, ...] = struct.unpack_from(f"={count}Q", entry.value, 8)
        previous = last_page + 1
        for page in pages:
            if page >= previous or page < 2 or page in known:
                _fail(f"free page {page} out of order or range", entry.offset)
            previous = page
        return pages

    def _claim(self, page: int, kind: int, offset: int) -> int:
        """Take a page that nothing else uses, of the right kind; its offset in the image."""
        if page >= self.page_count:
            _fail(f"page {page} of {self.page_count} is referenced", offset)
        if page in self.seen:
            _fail(f"page {page} is referenced twice", offset)
        self.seen.add(page)
        start = page * self.page_bytes
        number, _, found, _, _ = _PAGE_HEADER.unpack_from(self.data, start)
        if number != page or found != kind:
            _fail(f"page {page} says it is page {number} of kind {found:#x}, not {kind:#x}", start)
        return start

    def _nodes(self, start: int) -> list[int]:
        """Offsets of the nodes of a branch or leaf page, in order; their headers fit the page."""
        _, _, _, lower, upper = _PAGE_HEADER.unpack_from(self.data, start)
        count, odd = divmod(lower - _PAGE_HEADER.size, 2)
        if count < 1 or odd or not lower <= upper <= self.page_bytes:
            _fail(f"a page with bounds {lower} and {upper}", start)
        pointers = struct.unpack_from(f"={count}H", self.data, start + _PAGE_HEADER.size)
        for pointer in pointers:
            if pointer < upper or pointer % 2 or pointer + _NODE_HEADER.size > self.page_bytes:
                _fail(f"a node at {pointer} of its page", start)
        if len(set(pointers)) != count:
            _fail("two entries share a node", start)
        return [start + pointer for pointer in pointers]

    def _key(self, node: int, key_bytes: int) -> bytes:
        end = node + _NODE_HEADER.size + key_bytes
        if key_bytes > KEY_BYTES_MAX or end > self._page_end(node):
            _fail(f"a key of {key_bytes} bytes", node)
        return self.data[node + _NODE_HEADER.size : end]

    def _page_end(self, offset: int) -> int:
        return (offset // self.page_bytes + 1) * self.page_bytes

    def _children(self, nodes: list[int], visit: _Visit, integer_keys: bool) -> list[_Visit]:
        """The child pages of a branch page with the bounds its separator keys give them."""
        # liblmdb asserts two children, except in the free list's tree.
        if len(nodes) < (1 if integer_keys else 2):
            _fail("a branch page with one child", nodes[0])
        pages: list[int] = []
        keys: list[bytes | None] = []
        for index, node in enumerate(nodes):
            low, high, top, key_bytes = _NODE_HEADER.unpack_from(self.data, node)
            pages.append(low | high << 16 | top << 32)
            key = self._key(node, key_bytes)
            # The first key of a branch page is never compared and may be anything.
            keys.append(visit.first_key if index == 0 else key)
            if index and not _in_bounds(key, visit, integer_keys):
                _fail("a separator key out of its page's bounds", node)
            if index > 1 and not _less(keys[index - 1], key, integer_keys):
                _fail("separator keys out of order", node)
        ends = [*keys[1:], visit.end_key]
        return [
            _Visit(page=page, level=visit.level + 1, first_key=first, end_key=end)
            for page, first, end in zip(pages, keys, ends, strict=True)
        ]

    def _leaf(
        self, nodes: list[int], visit: _Visit, counts: dict[int, int], integer_keys: bool
    ) -> Iterator[_Entry]:
        previous: bytes | None = None
        for node in nodes:
            low, high, flags, key_bytes = _NODE_HEADER.unpack_from(self.data, node)
            key = self._key(node, key_bytes)
            if not key or not _in_bounds(key, visit, integer_keys):
                _fail("a key out of its page's bounds", node)
            if not _less(previous, key, integer_keys):
                _fail("keys out of order", node)
            previous = key
            if flags & ~(_IN_OVERFLOW | _IS_DATABASE) or flags == _IN_OVERFLOW | _IS_DATABASE:
                _fail(f"an entry with flags {flags:#x}", node)
            start = node + _NODE_HEADER.size + key_bytes
            size = low | high << 16
            if flags & _IN_OVERFLOW:
                value = self._overflow_value(start, size, counts)
            elif start + size > self._page_end(node):
                _fail(f"a value of {size} bytes", node)
            else:
                value = self.data[start : start + size]
            yield _Entry(offset=node, flags=flags, key=key, value=value)

    def _overflow_value(self, start: int, size: int, counts: dict[int, int]) -> bytes:
        """The value that fills pages of its own; `start` is where the entry names the first."""
        if start + 8 > self._page_end(start):
            _fail("a page number beyond its page", start)
        page = _NUMBER.unpack_from(self.data, start)[0]
        offset = self._claim(page, _OVERFLOW, start)
        count = _PAGE_HEADER.unpack_from(self.data, offset)[3:5]
        page_count = count[0] | count[1] << 16
        needed = -(-(_PAGE_HEADER.size + size) // self.page_bytes)
        if page_count < needed or page + page_count > self.page_count:
            _fail(f"{size} bytes in {page_count} overflow pages", offset)
        for tail in range(page + 1, page + page_count):
            if tail in self.seen:
                _fail(f"page {tail} is referenced twice", offset)
            self.seen.add(tail)
        counts[_OVERFLOW] += page_count
        return self.data[offset + _PAGE_HEADER.size : offset + _PAGE_HEADER.size + size]


def _less(left: bytes | None, right: bytes, integer_keys: bool) -> bool:
    if left is None:
        return True
    if integer_keys and len(left) == len(right) == 8:
        return bool(_NUMBER.unpack(left)[0] < _NUMBER.unpack(right)[0])
    return left < right


def _in_bounds(key: bytes, visit: _Visit, integer_keys: bool) -> bool:
    not_before = visit.first_key is None or not _less(key, visit.first_key, integer_keys)
    return not_before and (visit.end_key is None or _less(key, visit.end_key, integer_keys))
