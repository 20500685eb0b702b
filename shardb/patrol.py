"""Whether the objects that a step was made from are still what they were committed as.

Owns the check before a commit, and the one object of each commit that is digested in the background
while the next step is made. Knows nothing of steps. In a store in memory the images that a trainer
reads are the files themselves, so whoever writes into one changes what is trained on.

Invariant: a commit is recorded only when no file of its base was written to since its digest was
taken, and the object on patrol had its digest.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

from shardb.errors import ObjectCorruptError
from shardb.records import Commit, ShardEntry
from shardb.verifying import check_digest

if TYPE_CHECKING:
    from shardb.store import Store


class Patrol:
    """The checks of one store; it is asked by one transaction at a time of each branch."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._turn = 0
        self._running: dict[str, tuple[str, Future[None]]] = {}

    def check(self, base: Commit | None) -> None:
        """Raise ObjectCorruptError, naming the shard, when an object of the base has changed."""
        if base is None or not self._store.objects.verified.wanted:
            return
        for name, entry in base.shards.items():
            try:
                self._check_one(entry)
            except ObjectCorruptError as error:
                raise _changed(name, error) from error
        name, running = self._running.pop(base.branch, ("", None))
        if running is not None:
            try:
                running.result()
            except ObjectCorruptError as error:
                raise _changed(name, error) from error

    def go_on(self, commit: Commit) -> None:
        """Begin to digest the next object of a commit in memory, which is the next step's base."""
        if not (self._store.mapped and self._store.objects.verified.wanted):
            return
        names = list(commit.shards)
        name = names[self._turn % len(names)]
        self._turn += 1
        entry = commit.shards[name]
        running = self._store.writer.submit(lambda: self._digest(entry))
        self._running[commit.branch] = (name, running)

    def _check_one(self, entry: ShardEntry) -> None:
        objects = self._store.objects
        status = objects.look(entry.digest)
        if status is not None and objects.verified.is_changed(entry.digest, status.stamp):
            objects.open(entry.digest, entry.bytes)

    def _digest(self, entry: ShardEntry) -> None:
        cached = self._store.cache.get(entry.digest)
        if cached is not None:
            check_digest(self._store.objects.path(entry.digest), entry.digest, cached[1])


def _changed(name: str, error: ObjectCorruptError) -> ObjectCorruptError:
    return ObjectCorruptError(
        f"shard {name!r} was changed by somebody else while the next step was made from it; the "
        f"next step is not committed. {error.message}",
        path=error.path,
    )
