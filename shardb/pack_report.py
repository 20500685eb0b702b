"""What packing and unpacking say of themselves: results, and progress on the way.

Owns these forms alone; knows nothing of how anything is packed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedObject:
    """One object that was packed; `base_step` is the step of the object it is a difference to."""

    shard: str
    step: int
    digest: str
    bytes: int
    packed_bytes: int
    base: str | None
    base_step: int | None


@dataclass(kw_only=True)
class Packed:
    """What a packing did, and why it left objects as they are."""

    objects: list[PackedObject] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.objects)

    @property
    def packed_bytes(self) -> int:
        return sum(item.packed_bytes for item in self.objects)

    def to_json(self) -> dict[str, Any]:
        return {
            "objects": [
                {name: getattr(item, name) for name in PackedObject.__slots__}
                for item in self.objects
            ],
            "skipped": dict(self.skipped),
            "bytes": self.bytes,
            "packed_bytes": self.packed_bytes,
            "freed_bytes": self.bytes - self.packed_bytes,
            "seconds": self.seconds,
        }


@dataclass(frozen=True, kw_only=True)
class PackProgress:
    """How far a packing, or unpacking, has come."""

    objects: int
    objects_total: int
    bytes: int
    bytes_total: int
    seconds: float


@dataclass(kw_only=True)
class Unpacked:
    """What an unpacking did."""

    objects: int = 0
    bytes: int = 0
    packed_bytes: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "objects": self.objects,
            "bytes": self.bytes,
            "packed_bytes": self.packed_bytes,
            "seconds": self.seconds,
        }


Item = TypeVar("Item")
OnProgress = Callable[[PackProgress], None]


def with_progress(pending: Sequence[tuple[Item, int]], tell: OnProgress | None) -> Iterator[Item]:
    """Give each item, and tell of it when it is done."""
    started, done_bytes = time.monotonic(), 0
    total_bytes = sum(size for _, size in pending)
    for number, (item, size) in enumerate(pending):
        yield item
        done_bytes += size
        if tell is not None:
            tell(
                PackProgress(
                    objects=number + 1,
                    objects_total=len(pending),
                    bytes=done_bytes,
                    bytes_total=total_bytes,
                    seconds=time.monotonic() - started,
                )
            )
