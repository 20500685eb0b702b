"""What can be asked of a store, whether it is open for writing or only looked at.

Owns the questions that need nothing but the tables. Knows nothing of where these come from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from shardb import refs
from shardb.filesystem import FileSystem
from shardb.format import Format
from shardb.leases import Leases
from shardb.locks import Locks
from shardb.log import Log
from shardb.objects import ObjectFiles
from shardb.records import Commit
from shardb.recovery import RecoveryReport
from shardb.state import DEFAULT_BRANCH, Tables

T = TypeVar("T")


class Readable(Protocol):
    """Something that shows one consistent state of the tables."""

    def read(self, body: Callable[[Tables], T]) -> T: ...


class Looking:
    """The questions; a subclass has the parts."""

    root: str
    files: FileSystem
    format: Format
    recovery: RecoveryReport
    index: Readable
    log: Log
    locks: Locks
    leases: Leases
    objects: ObjectFiles

    def branches(self) -> dict[str, Commit]:
        """Branch names and the commits they point to."""
        return self.index.read(refs.branch_heads)

    def snapshots(self) -> dict[str, Commit]:
        """Snapshot names and the commits they pin."""
        return self.index.read(refs.snapshot_commits)

    def commits(self) -> list[Commit]:
        """Every retained commit, oldest first."""
        return self.index.read(refs.live_commits)

    def resolve(self, ref: str | None = None) -> Commit:
        """The retained commit that `ref` names (see `shardb.refs`), or NotFoundError."""
        return self.index.read(lambda tables: refs.resolve(tables, ref))

    def durable_step(self, branch: str = DEFAULT_BRANCH) -> int | None:
        """The newest step of a branch that survives power loss; None before the first commit."""
        head = self.branches().get(branch)
        return head.step if head else None
