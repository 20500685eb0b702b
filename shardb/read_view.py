"""A leased read view of one commit.

Owns the lease while it is open: nothing of the commit is recycled until it is closed. Knows nothing
of how commits are named.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from shardb import refs
from shardb.errors import NotFoundError, UsageError
from shardb.leases import Lease
from shardb.records import Commit
from shardb.views import ShardView

if TYPE_CHECKING:
    from shardb.store import Store


class ReadView:
    """One commit, leased: nothing of it is recycled while the view is open."""

    def __init__(self, store: Store, commit: Commit, lease: Lease) -> None:
        self._store = store
        self._lease: Lease | None = lease
        self.commit = commit

    def names(self) -> list[str]:
        return list(self.commit.shards)

    def read(self, name: str) -> ShardView:
        """One shard; NotFoundError when the commit has no such shard."""
        if self._lease is None:
            raise UsageError("this view is closed; what it read may be recycled by now")
        entry = self.commit.shards.get(name)
        if entry is None:
            raise NotFoundError(refs.no_such("shard", name, self.commit.shards))
        return self._store.read_object(name, entry)

    def close(self) -> None:
        if self._lease is not None:
            self._store.leases.release(self._lease)
            self._lease = None

    def __enter__(self) -> ReadView:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
