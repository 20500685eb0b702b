"""How many references an object has, and which objects are packed against which.

Owns the tables `objects` (digest to [bytes, references]) and `packs` (digest to a `PackRow`).
References come from commits and from packed objects that are deltas: the base of a delta cannot go
before it. Knows nothing of files.

Invariants: a row of `packs` has a row of `objects`; bases form no circle, and no object needs more
than `CHAIN_MAX` packed files to be read.

Whether an object is packed must follow from the log alone, though retiring is not logged. So it is
over as soon as no pinned commit needs the object: a commit that brings it back finds it stored
whole again (see `forget_lost` and `shardb.publishing`), whether a reader's lease had kept the
packed file or not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardb.errors import LogDamagedError

if TYPE_CHECKING:
    from shardb.state import Tables

# Packed files that are read for one object: itself, its base, the base of that, and so on.
CHAIN_MAX = 4
DIGEST_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Retired:
    """An object that nothing references any more, and whether it was packed."""

    digest: str
    bytes: int
    packed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PackRow:
    """How an object is packed.

    `bytes` is its size, `packed_bytes` that of the packed file, `file_digest` the xxh3-128 of that
    file, and `base` the object that it is a delta against.
    """

    file_digest: bytes
    base: str | None
    bytes: int
    packed_bytes: int

    def to_row(self) -> list[Any]:
        """The row as tables hold it."""
        return [self.base, self.bytes, self.packed_bytes, self.file_digest]

    @staticmethod
    def from_row(row: Sequence[Any]) -> PackRow:
        """Read a row; TypeError or ValueError when it is none."""
        base, size, packed, digest = row
        if not (base is None or (type(base) is str and len(bytes.fromhex(base)) == DIGEST_BYTES)):
            raise TypeError(f"the base of a packed object is {base!r}")
        if type(size) is not int or type(packed) is not int or type(digest) is not bytes:
            raise TypeError("a packed object has base, size, packed size and digest")
        if size <= 0 or packed <= 0 or len(digest) != DIGEST_BYTES:
            raise ValueError(f"a packed object has {size} bytes in {packed}")
        return PackRow(base=base, bytes=size, packed_bytes=packed, file_digest=digest)


def reference(tables: Tables, digest: str, size: int, change: int) -> list[Retired]:
    """Count one reference more or less; return what is retired with the last one."""
    known = tables.get("objects", digest)
    references = (known[1] if known else 0) + change
    if references > 0:
        tables.put("objects", digest, [size, references])
        return []
    if references < 0:
        raise LogDamagedError(f"a log record gives up object {digest}, which nothing references")
    tables.delete("objects", digest)
    row = pack_row(tables, digest)
    retired = Retired(digest=digest, bytes=size, packed=row is not None)
    return [retired, *_drop_row(tables, digest, row)]


def _drop_row(tables: Tables, digest: str, row: PackRow | None) -> list[Retired]:
    if row is None:
        return []
    tables.delete("packs", digest)
    return reference(tables, row.base, row.bytes, -1) if row.base is not None else []


# Packing


def pack_row(tables: Tables, digest: str) -> PackRow | None:
    """How an object is packed; None when it is stored whole, or not at all."""
    row = tables.get("packs", digest)
    return None if row is None else PackRow.from_row(row)


def pack_rows(tables: Tables) -> dict[str, PackRow]:
    """Every packed object."""
    return {digest: PackRow.from_row(row) for digest, row in tables.items("packs")}


def add_pack(tables: Tables, digest: str, row: PackRow) -> None:
    """Say that an object is packed, which references its base; LogDamagedError when it cannot be.

    The length of a chain is counted towards its end alone: what is a delta against this object is
    for the packer to count.
    """
    known = tables.get("objects", digest)
    if known is None or known[0] != row.bytes or tables.get("packs", digest) is not None:
        raise LogDamagedError(f"object {digest} is unknown, of another size, or packed already")
    if row.base is not None:
        base = tables.get("objects", row.base)
        chain = chain_of(tables, row.base)
        needed = {row.base, *(rest.base for d in chain if (rest := pack_row(tables, d)))}
        if base is None or base[0] != row.bytes or digest in needed or len(chain) >= CHAIN_MAX:
            raise LogDamagedError(f"object {row.base} cannot be the base of object {digest}")
        reference(tables, row.base, row.bytes, 1)
    tables.put("packs", digest, row.to_row())


def remove_pack(tables: Tables, digest: str) -> list[Retired]:
    """Say that an object is stored whole again; return what is retired with that."""
    row = pack_row(tables, digest)
    if row is None:
        raise LogDamagedError(f"object {digest} is not packed")
    return _drop_row(tables, digest, row)


def chain_of(tables: Tables, digest: str) -> list[str]:
    """The packed objects that are read for one object: itself, its base, and so on.

    Empty for an object that is stored whole. It ends after `CHAIN_MAX`, whatever the rows say.
    """
    chain: list[str] = []
    at: str | None = digest
    while at is not None and len(chain) < CHAIN_MAX and (row := pack_row(tables, at)) is not None:
        chain.append(at)
        at = row.base
    return chain


# Held


def held(tables: Tables, digests: Collection[str]) -> set[str]:
    """Those of `digests` that a pinned commit needs: their files are in the store.

    A condemned commit proves nothing. Sweeping is not logged, so tables that were made anew from
    the log still hold condemned commits whose files were given to others long ago.
    """
    condemned = Counter(
        bytes(digest).hex()
        for commit, _ in tables.items("condemned")
        for digest, *_ in tables.get("commits", commit)["shards"].values()
    )
    if not condemned:
        return {digest for digest in digests if tables.get("objects", digest) is not None}
    deltas: dict[str, list[str]] = {}
    for digest, row in pack_rows(tables).items():
        if row.base is not None:
            deltas.setdefault(row.base, []).append(digest)
    known: dict[str, bool] = {}

    def is_held(digest: str) -> bool:
        if digest not in known:
            known[digest] = False  # nothing holds itself
            row = tables.get("objects", digest)
            own = deltas.get(digest, [])
            by_commit = row is not None and row[1] - len(own) > condemned[digest]
            known[digest] = by_commit or any(is_held(delta) for delta in own)
        return known[digest]

    return {digest for digest in digests if is_held(digest)}


def lost(tables: Tables, digests: Collection[str]) -> list[str]:
    """Those of `digests` that are packed, and that no pinned commit needs any more."""
    packed = [digest for digest in digests if tables.get("packs", digest) is not None]
    if not packed:
        return []
    still = held(tables, packed)
    return [digest for digest in packed if digest not in still]


def forget(tables: Tables, digests: Collection[str]) -> list[Retired]:
    """Say of lost objects that they are stored whole: a commit brings them back so."""
    return [item for digest in digests for item in remove_pack(tables, digest)]


# Full states


def held_packs(tables: Tables) -> dict[str, list[Any]]:
    """The rows of packed objects that pinned commits need."""
    rows = dict(tables.items("packs"))
    still = held(tables, rows) if rows else set()
    return {digest: row for digest, row in rows.items() if digest in still}


def restore_packs(tables: Tables, rows: Mapping[str, Any], digests: Collection[str]) -> None:
    """Put back the rows of `digests` and of their bases, into tables whose commits are counted."""
    for digest in digests:
        at: str | None = digest
        while at is not None and at in rows and tables.get("packs", at) is None:
            row = PackRow.from_row(rows[at])
            tables.put("packs", at, row.to_row())
            if row.base is not None:
                reference(tables, row.base, row.bytes, 1)
            at = row.base
