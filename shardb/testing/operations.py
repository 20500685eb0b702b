"""The nouns of a recorded workload: operations on files and directories, and planted faults.

Knows nothing of how operations are recorded or which of them survive a crash.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from typing import Literal

PageModel = Literal["new", "old", "zero"]


class Kind(Enum):
    """What an operation changes."""

    CREATE = "create"
    MAKE_DIRECTORY = "make_directory"
    REMOVE_DIRECTORY = "remove_directory"
    RENAME = "rename"
    UNLINK = "unlink"
    WRITE = "write"
    TRUNCATE = "truncate"
    EXTEND = "extend"
    SYNC = "sync"
    SYNC_FAILED = "sync_failed"
    SYNC_DIRECTORY = "sync_directory"
    INDEX = "index"
    IGNORED = "ignored"


ENTRY_KINDS = frozenset(
    (Kind.CREATE, Kind.MAKE_DIRECTORY, Kind.REMOVE_DIRECTORY, Kind.RENAME, Kind.UNLINK)
)
CONTENT_KINDS = frozenset((Kind.WRITE, Kind.TRUNCATE, Kind.EXTEND))


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One operation that changed something, in the order in which it happened.

    Paths are relative to the recorded root. `inode` is the recorder's own number of the file: the
    operating system reuses its numbers. `length` is the new size of TRUNCATE and EXTEND, in bytes.
    """

    number: int
    kind: Kind
    path: str
    target: str = ""
    inode: int = 0
    offset: int = 0
    length: int = 0
    data: bytes = b""

    @property
    def names(self) -> tuple[str, ...]:
        """The directory entries that the operation changes."""
        if self.kind not in ENTRY_KINDS:
            return ()
        return (self.path, self.target) if self.kind is Kind.RENAME else (self.path,)

    def __str__(self) -> str:
        detail = {
            Kind.RENAME: f" -> {self.target}",
            Kind.WRITE: f" [{self.offset}, +{len(self.data)}]",
            Kind.TRUNCATE: f" to {self.length}",
            Kind.EXTEND: f" to {self.length}",
        }.get(self.kind, "")
        return f"{self.number} {self.kind.value} {self.path}{detail}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Fail the `nth` call (from 1) of a method of the file system, once or from then on.

    `error` is an errno; with `short` the call transfers only so many bytes instead of failing.
    `pages` says what a file holds in memory after a failed sync: what was written (new), what was
    durable before (old) or zeros where the lost writes were.
    """

    operation: str
    nth: int
    error: int = 0
    persistent: bool = False
    short: int | None = None
    pages: PageModel = "new"
    path_contains: str = ""

    def __str__(self) -> str:
        what = f"short {self.short}" if self.short is not None else os.strerror(self.error)
        return f"{self.operation} #{self.nth}{' and later' if self.persistent else ''}: {what}" + (
            f", pages {self.pages}" if self.pages != "new" else ""
        )


class Crash(BaseException):
    """The simulated machine stopped. No `except Exception` may catch it."""
