"""The seam to object storage: keys and bytes, and the two conditional writes that all rests on.

Owns the contract. `shardb.remote.cloud` fulfils it with an object storage library, and
`shardb.remote.directory` with a plain directory. Knows nothing of commits.

Every method raises RemoteFailedError for what may go away by itself, UsageError for missing or
refused credentials, and NotFoundError for a bucket that does not exist. A write is atomic: a reader
sees the whole value or none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """What identifies one version of a value: compare-and-swap refuses to write over another."""

    etag: str | None
    version: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A small value and its version."""

    data: bytes
    version: Version


class Bucket(Protocol):
    """Values under keys, below one URL. All methods may be called by several threads."""

    @property
    def url(self) -> str: ...

    def read(self, key: str, *, limit_bytes: int) -> Stored | None:
        """A small value, None where there is none; CorruptionError beyond the limit."""
        ...

    def size(self, key: str) -> int | None:
        """Bytes of a value, None where there is none."""
        ...

    def chunks(self, key: str, start: int) -> Iterator[memoryview]:
        """The bytes of a value from `start` on; ObjectMissingError where there is none."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Write a value where there is none; False, and nothing written, where there is one."""
        ...

    def replace(self, key: str, data: bytes, version: Version) -> bool:
        """Write over this version of a value; False, and nothing written, where it is another."""
        ...

    def keeps_conditions(self, key: str, data: bytes) -> bool:
        """Whether both conditional writes are refused where they must be.

        `data` is what the key holds: storage that ignores conditions only writes it once more.
        """
        ...

    def upload(self, key: str, size_bytes: int, chunks: Iterator[bytes]) -> None:
        """Write a large value, over any other. What `chunks` raises ends it and leaves nothing."""
        ...

    def keys(self, prefix: str) -> Iterator[str]:
        """All keys that begin with `prefix`, which ends at a slash."""
        ...
