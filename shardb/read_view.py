"""Read views of one commit.

Owns the lease while a view is open: nothing of the commit is recycled until it is closed. Knows
nothing of how commits are named.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from shardb import refs
from shardb.errors import NotFoundError, UsageError
from shardb.leases import Lease
from shardb.records import Commit, ShardEntry
from shardb.views import ShardView

if TYPE_CHECKING:
    from shardb.store import Store


class ObjectReader(Protocol):
    """Whatever gives the object of a shard."""

    def read_object(self, name: str, entry: ShardEntry) -> ShardView: ...


class CommitView:
    """One commit and its shards; use it as a context manager."""

    def __init__(self, store: ObjectReader, commit: Commit) -> None:
        self._store = store
        self._open = True
        self.commit = commit

    def names(self) -> list[str]:
        return list(self.commit.shards)

    def read(self, name: str) -> ShardView:
        """One shard; NotFoundError when the commit has no such shard."""
        if not self._open:
            raise UsageError("this view is closed; what it read may be recycled by now")
        entry = self.commit.shards.get(name)
        if entry is None:
            raise NotFoundError(refs.no_such("shard", name, self.commit.shards))
        return self._store.read_object(name, entry)

    def close(self) -> None:
        self._open = False

    def __enter__(self) -> CommitView:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class ReadView(CommitView):
    """One commit, leased: nothing of it is recycled while the view is open."""

    def __init__(self, store: Store, commit: Commit, lease: Lease) -> None:
        super().__init__(store, commit)
        self._leases = store.leases
        self._lease = lease

    def close(self) -> None:
        super().close()
        self._leases.release(self._lease)  # once is enough

    def __enter__(self) -> ReadView:
        return self
