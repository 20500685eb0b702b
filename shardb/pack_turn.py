"""One packing at a time: taking the turn, and tidying up after one that died.

Owns the lock under which packed files are staged. Knows nothing of what is packed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardb.errors import BranchLockedError, ConflictError
from shardb.objects import PACK_SUFFIX, branch_token
from shardb.references import held, pack_rows
from shardb.store import Store

# The branch, impossible as a name, under which packed files are staged.
PACK_KEY = "@pack"


@contextmanager
def packing_alone(store: Store) -> Iterator[None]:
    """Be the one who packs; remove what an earlier packing left when it died."""
    store.appender.check_usable()
    try:
        with store.receiving(PACK_KEY), store.appender.errors("packing"):
            _tidy(store)
            yield
    except BranchLockedError as error:
        raise ConflictError(
            f"{store.root}: another process packs this store; wait for it", path=store.root
        ) from error


def _tidy(store: Store) -> None:
    """Images of packed objects, set aside or not yet, and staged files."""
    objects = store.objects
    with store.appender.exclusive("tidying up after a packing"):
        packed = store.index.read(pack_rows)
        names = set(store.files.list(objects.directory))
        whole = store.index.read(lambda tables: held(tables, packed))
        for digest in whole:
            image = objects.path(digest).rpartition("/")[2]
            if image in names and f"{digest}{PACK_SUFFIX}" in names:
                objects.unplace(digest, PACK_KEY)
    begin = f"staged.{branch_token(PACK_KEY)}."
    for name in store.files.list(objects.spare_directory):
        if name.startswith(begin):
            store.files.unlink(f"{objects.spare_directory}/{name}")


def sync_objects_directory(store: Store) -> None:
    """Make names durable; a failed sync poisons the store."""
    try:
        store.objects.sync_directory()
    except OSError as error:
        raise store.appender.fail(store.appender.error("syncing objects/", error)) from error
