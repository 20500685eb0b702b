"""Giving space back: everything in a store that no commit, snapshot or reader needs.

Owns what may be removed and when. Only the index says what an object is needed for, never a name;
it is asked under the log's lock, caught up with the log. There, objects are only moved to `spare/`,
which is quick; the files are removed after the lock is given back.

Nothing here needs new space, so that it works on a full disk, however often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from shardb import reserve, state
from shardb.errors import StorageFullError
from shardb.filesystem import FileSystem, RealFileSystem
from shardb.format import read_format
from shardb.fsck_leftovers import OBJECT_NAME, PACK_NAME, STAGED_NAME, is_duplicate, spare_is_used
from shardb.fsck_view import is_held
from shardb.objects import free_bytes_of
from shardb.records import Record, new_record
from shardb.references import Retired
from shardb.state import DictTables, Tables
from shardb.storage_errors import reason, storage_errors
from shardb.store import Store
from shardb.store import open as open_store

FREE = "kept for reuse"
UNREFERENCED = "no commit needs it"
STAGED = "its transaction ended without a commit"
DUPLICATE = "its object is stored packed"
PARTIAL = "its writer died before it was whole"
SET_ASIDE = "an unreadable index, set aside earlier"
DEAD_LEASE = "its reader is gone"


@dataclass(frozen=True, kw_only=True, slots=True)
class Garbage:
    """A file that is not needed: its path, the bytes allocated to it, and why it can go."""

    path: str
    bytes: int
    why: str


@dataclass(kw_only=True)
class Collected:
    """What was removed, or would be in a dry run.

    `left` says of each file that this user may not remove why not, `notes` what else could not be.
    """

    dry_run: bool
    removed: list[Garbage] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    abandoned: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def freed_bytes(self) -> int:
        return sum(item.bytes for item in self.removed)

    def to_json(self) -> dict[str, Any]:
        return {
            "dry_run": self.dry_run,
            "freed_bytes": self.freed_bytes,
            "removed": [
                {"path": item.path, "bytes": item.bytes, "why": item.why} for item in self.removed
            ],
            "left": self.left,
            "abandoned": self.abandoned,
            "notes": self.notes,
        }


def collect_garbage(
    root: str,
    *,
    dry_run: bool = False,
    files: FileSystem | None = None,
    allow_network: bool = False,
) -> Collected:
    """Remove what nothing needs from the store at `root`; with `dry_run` only say what.

    Safe beside writers and readers. Raises what opening a store raises; StorageFullError only where
    spare files and the reserve together leave no room to catch the index up. What this user may not
    remove is left and told of, and the rest is removed.
    """
    files = files or RealFileSystem()
    collected = Collected(dry_run=dry_run)
    with storage_errors(files, root, "collecting garbage"):
        _collect_garbage(files, root, collected, allow_network=allow_network)
    return collected


def _collect_garbage(
    files: FileSystem, root: str, collected: Collected, *, allow_network: bool
) -> None:
    read_format(files, root)

    def opening() -> Store:
        return open_store(root, files=files, allow_network=allow_network)

    with _open_or_make_room(files, root, opening, collected) as store:
        _Collection(store, collected).run()
    if not collected.dry_run:
        reserve.ensure(files, root)


def _open_or_make_room(
    files: FileSystem, root: str, opening: Callable[[], Store], collected: Collected
) -> Store:
    """Open the store; on a disk too full for that, spare files go first, then the reserve."""
    try:
        return opening()
    except StorageFullError:
        if collected.dry_run:
            raise
    for path in _free_files(files, root):
        _remove(files, path, FREE, collected)
    return reserve.with_reserve(files, root, opening)


class _Collection:
    """One collection in an open store."""

    def __init__(self, store: Store, collected: Collected) -> None:
        self.store = store
        self.files = store.files
        self.root = store.root
        self.collected = collected
        self.why_spare: dict[str, str] = {}  # path in spare/ to why its object was moved there

    def run(self) -> None:
        with self.store.appender.exclusive("collecting garbage"):
            self._collect()
        self._remove_spare()
        if self._forget_abandoned():
            self._remove_spare()

    def _collect(self) -> None:
        """What must be done under the log's lock."""
        self._remove_dead_leases()
        needed, packed = self._needed_objects()
        names = self.files.list(f"{self.root}/objects")
        for name in names:
            path, image = f"{self.root}/objects/{name}", OBJECT_NAME.match(name)
            pack = PACK_NAME.match(name)
            if pack is not None and pack.group(1) not in packed:
                self._remove(path, UNREFERENCED)
            elif image is not None and image.group(1) not in needed:
                self._move_to_spare(path)
            elif image is not None and is_duplicate(image.group(1), names, packed):
                self._remove(path, DUPLICATE)  # not recycled: the name is that of a live object
        for path, why in self._debris():
            self._remove(path, why)

    def _remove_dead_leases(self) -> None:
        directory = self.store.leases.directory
        for name in self.files.list(directory):
            if not is_held(self.files, f"{directory}/{name}"):
                self._note(f"{directory}/{name}", DEAD_LEASE)
        if not self.collected.dry_run:
            self.store.leases.leased_commits()  # removes them, each under its own lock

    def _needed_objects(self) -> tuple[set[str], set[str]]:
        """Digests that commits need, after those are let go that only a dead reader kept.

        The second set are those of them that are packed.
        """
        index = self.store.index
        if self.collected.dry_run:
            tables = index.read(_copy)
            state.sweep(tables, {lease["commit"] for lease in self.store.leases.describe_all()})
            return set(tables.tables["objects"]), set(tables.tables["packs"])
        if index.read(lambda tables: any(tables.items("condemned"))):
            try:
                with suppress(PermissionError):  # they are in `objects/` still, and told of below
                    swept = reserve.with_reserve(self.files, self.root, self._sweep)
                    self.store.objects.retire(swept)
            except StorageFullError as error:
                self.collected.notes.append(f"retired commits are kept for now: {error}")
        return index.read(lambda tables: (_keys(tables, "objects"), _keys(tables, "packs")))

    def _sweep(self) -> list[Retired]:
        leases = self.store.leases
        return self.store.index.write(lambda t: state.sweep(t, leases.leased_commits()))

    def _debris(self) -> Iterator[tuple[str, str]]:
        for directory in ("wal", "objects"):
            for name in self.files.list(f"{self.root}/{directory}"):
                if name.endswith(".partial"):
                    yield f"{self.root}/{directory}/{name}", PARTIAL
        yield f"{self.root}/FORMAT.partial", PARTIAL
        # A segment was to be closed, and there was no room for the next one.
        yield self.store.log.compressed_path(self.store.log.sequences()[-1]), PARTIAL
        for name in self.files.list(f"{self.root}/index"):
            if name.startswith("unreadable-"):
                yield f"{self.root}/index/{name}", SET_ASIDE

    # Without the lock

    def _remove_spare(self) -> None:
        """Remove what is kept for reuse and what dead writers staged.

        A live writer may take a free file at the same moment: then it is gone for us. Names are
        listed before a branch is found to have no writer, so a writer that comes later has others.
        """
        for name in self.files.list(f"{self.root}/spare"):
            staged = STAGED_NAME.match(name)
            if staged and not spare_is_used(self.files, self.root, staged):
                self._remove(f"{self.root}/spare/{name}", STAGED)
        for path in _free_files(self.files, self.root):
            self._remove(path, self.why_spare.get(path, FREE))

    def _forget_abandoned(self) -> bool:
        """Give up the commits that rewinds left behind: the one thing that adds to the log."""

        def gc_record(tables: Tables) -> Record | None:
            abandoned = [commit for commit, _ in tables.items("abandoned")]
            self.collected.abandoned = abandoned
            wanted = abandoned and not self.collected.dry_run
            return new_record("gc", abandoned=abandoned) if wanted else None

        try:
            return self.store.appender.change(gc_record) is not None
        except StorageFullError as error:
            self.collected.abandoned = []
            self.collected.notes.append(f"commits left by rewinds are kept for now: {error}")
            return False

    # Acts

    def _move_to_spare(self, path: str) -> None:
        if self.collected.dry_run:
            self._note(path, UNREFERENCED)
            return
        size_bytes = self.files.status(path).size_bytes
        with _left_if_refused(self.files, path, self.collected):
            self.why_spare[self.store.objects.set_free(path, size_bytes)] = UNREFERENCED

    def _remove(self, path: str, why: str) -> None:
        _remove(self.files, path, why, self.collected)

    def _note(self, path: str, why: str) -> None:
        _note(self.files, path, why, self.collected)


def _free_files(files: FileSystem, root: str) -> list[str]:
    names = files.list(f"{root}/spare")
    return [f"{root}/spare/{name}" for name in names if free_bytes_of(name) is not None]


def _remove(files: FileSystem, path: str, why: str, collected: Collected) -> None:
    """Remove a file that may be gone already."""
    if _note(files, path, why, collected) and not collected.dry_run:
        removed = False
        with _left_if_refused(files, path, collected), suppress(FileNotFoundError):
            files.unlink(path)
            removed = True
        if not removed:
            collected.removed.pop()


@contextmanager
def _left_if_refused(files: FileSystem, path: str, collected: Collected) -> Iterator[None]:
    """Go on without a file that this user may not rename or remove: the others are none the less.

    A file is made immutable by those who mean it: `chattr +i`.
    """
    try:
        yield
    except PermissionError as error:
        collected.left.append(f"{path}: not removed: {reason(files, error)}")


def _note(files: FileSystem, path: str, why: str, collected: Collected) -> bool:
    """Count a file as removed; False when it is not there."""
    try:
        size_bytes = files.status(path).allocated_bytes
    except FileNotFoundError:
        return False
    collected.removed.append(Garbage(path=path, bytes=size_bytes, why=why))
    return True


def _keys(tables: Tables, table: str) -> set[str]:
    return {key for key, _ in tables.items(table)}


def _copy(tables: Tables) -> DictTables:
    """Tables in memory, to see what a change would give."""
    copied = DictTables()
    for name in state.TABLES:
        for key, value in tables.items(name):
            copied.put(name, key, value)
    return copied
