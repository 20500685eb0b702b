"""Putting a package in place whole: built beside its target, synced, and renamed there.

Owns the draft beside a target, what a killed export left of one, and the replacement of what is at
the target. Knows nothing of what is in a package. Invariants: at every moment the target is what it
was before or what it will be; a draft whose maker is dead is recognised by its released flock, and
the next export to the same target removes it.

Where the file system cannot exchange two names in one call, replacing a directory takes two
renames. A kill between them leaves the old one under `.NAME.replaced-…` and nothing at the target;
the next export to that target puts it back first.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol

from shardb.errors import StorageFullError
from shardb.filesystem import RealFileSystem
from trainer.errors import InputError

FILE_MODE = 0o644
DIRECTORY_MODE = 0o755
SPARE_BYTES = 1 << 20
# What shows that a directory is a package and not somebody's home.
PACKAGE_MARKS = ("export_manifest.json", "config.json", "adapter_config.json")
_NOREPLACE = 1
_EXCHANGE = 2
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
_HERE = -100
_ATTEMPTS = 100
_libc = ctypes.CDLL(None, use_errno=True)


class Rename(Protocol):
    """`renameat2(2)` in one file system: source, target, flags; raises OSError."""

    def __call__(self, source: Path, target: Path, flags: int, /) -> None: ...


class Draft:
    """A file or directory beside its target, the caller's until `publish` or the block's end.

    An interrupt may come between any two lines: what is about to be made is noted first, and in an
    `ExitStack` the draft is pushed before `begin`.
    """

    def __init__(
        self, target: Path, *, is_directory: bool, overwrite: bool, rename: Rename | None = None
    ) -> None:
        self.target = Path(os.path.realpath(target))
        self.path = self.target  # until it has begun
        self._is_directory = is_directory
        self._overwrite = overwrite
        self._rename = rename or rename_flags
        self._made_parents: list[Path] = []
        self._made: list[Path] = []  # of these, what is still there at the end goes
        self._lock = -1
        if not self.target.name:
            raise InputError(f"--out {target}: give the name of something to make")
        put_back_replaced(self.target)
        self._check_target()

    def begin(self) -> None:
        """Make the draft, empty; whatever ends this leaves nothing once the block is left."""
        self._make_parents()
        remove_dead(self.target)
        self._claim()

    def __enter__(self) -> Draft:
        try:
            self.begin()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        """Put back what was not replaced after all, then remove the draft, or what was replaced."""
        try:
            put_back_replaced(self.target)
            for path in self._made:
                _remove(path)
            for parent in reversed(self._made_parents):
                with suppress(OSError):  # a target is in it, or it was not made after all
                    parent.rmdir()
        finally:
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1

    def check_space(self, needed_bytes: int) -> None:
        """Raise StorageFullError where the draft would not fit; call it inside the block."""
        free = RealFileSystem().space(str(self.path.parent)).free_bytes
        if free < needed_bytes + SPARE_BYTES:
            raise StorageFullError(
                f"{self.target.parent}: {needed_bytes:,} bytes are needed and {free:,} are free:"
                " free some, or give another --out",
                path=str(self.target.parent),
            )

    def publish(self) -> None:
        """Sync everything in the draft and give it the target's name."""
        for path in _everything_in(self.path):
            _settle(path)
        _sync(self.path.parent)
        try:
            self._rename(self.path, self.target, _NOREPLACE)
        except OSError as error:
            self._put_in_place(error)
        _sync(self.target.parent)
        # After an exchange the old content has the draft's name.
        _remove(self.path)

    def _put_in_place(self, error: OSError) -> None:
        if error.errno in _UNSUPPORTED and not os.path.lexists(self.target):
            os.rename(self.path, self.target)
        elif error.errno != errno.EEXIST and error.errno not in _UNSUPPORTED:
            raise error
        elif not self._overwrite:
            raise self._is_there() from error
        elif self._is_directory:
            self._exchange()
        else:
            os.replace(self.path, self.target)

    def _exchange(self) -> None:
        try:
            self._rename(self.path, self.target, _EXCHANGE)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            replaced = _beside(self.target, "replaced", os.urandom(4).hex())
            self._made.append(replaced)
            os.rename(self.target, replaced)
            os.rename(self.path, self.target)
            _remove(replaced)

    def _check_target(self) -> None:
        if not os.path.lexists(self.target):
            return
        if self.target.is_dir() != self._is_directory:
            found = "directory" if self.target.is_dir() else "file"
            raise InputError(f"--out {self.target}: a {found} is there: give another name")
        if not self._overwrite:
            raise self._is_there()
        if self._is_directory and not _is_package(self.target):
            raise InputError(
                f"--out {self.target}: what is there is no package (no"
                f" {' and no '.join(PACKAGE_MARKS)}): --overwrite replaces packages only; give"
                " another --out"
            )

    def _is_there(self) -> InputError:
        return InputError(
            f"--out {self.target}: it is there already: give another name, or --overwrite"
        )

    def _make_parents(self) -> None:
        missing = [p for p in self.target.parents if not p.exists()]
        for parent in reversed(missing):
            self._made_parents.append(parent)
            try:
                parent.mkdir()
            except FileExistsError:  # another export made it
                self._made_parents.pop()

    def _claim(self) -> None:
        """Make the draft and lock it; try again when it was taken for a dead one before that."""
        for _ in range(_ATTEMPTS):
            path = _beside(self.target, "export", os.urandom(4).hex())
            self._made.append(path)
            if self._is_directory:
                path.mkdir()
                file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            else:
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
            fcntl.flock(file, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.stat(path).st_ino == os.fstat(file).st_ino:
                    self.path, self._lock = path, file
                    return
            os.close(file)
        raise InputError(f"--out {self.target}: other exports keep removing the draft: try again")


def check_apart(out: Path, store: Path) -> None:
    """Refuse a target inside the store, and one that holds it."""
    target, root = Path(os.path.realpath(out)), Path(os.path.realpath(store))
    if target == root or target in root.parents or root in target.parents:
        raise InputError(f"--out {out}: it and the store {store} overlap: choose a place apart")


def remove_dead(target: Path) -> list[Path]:
    """Remove drafts of exports to `target` whose makers are dead; give what was removed."""
    dead = [path for path in _named(target, "export") if _is_dead(path)]
    for path in dead:
        _remove(path)
    if target.exists():
        for path in _named(target, "replaced"):
            _remove(path)
    return dead


def put_back_replaced(target: Path) -> None:
    """Undo the first of two renames where a kill came before the second."""
    for path in _named(target, "replaced"):
        if not os.path.lexists(target):
            os.rename(path, target)


def rename_flags(source: Path, target: Path, flags: int) -> None:
    """Call renameat2(2); OSError with EEXIST, or EINVAL where the file system has no such flag."""
    result = _libc.renameat2(_HERE, os.fsencode(source), _HERE, os.fsencode(target), flags)
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(target))


def _beside(target: Path, what: str, unique: str) -> Path:
    return target.with_name(f".{target.name}.{what}-{unique}")


def _named(target: Path, what: str) -> list[Path]:
    start = f".{target.name}.{what}-"
    with suppress(FileNotFoundError, NotADirectoryError):
        return [p for p in sorted(target.parent.iterdir()) if p.name.startswith(start)]
    return []


def _is_dead(path: Path) -> bool:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(file)
    return True


def _is_package(directory: Path) -> bool:
    names = os.listdir(directory)
    return not names or any(mark in names for mark in PACKAGE_MARKS)


def _everything_in(path: Path) -> Iterator[Path]:
    """Give files before the directories that hold them."""
    if path.is_dir():
        for inner in sorted(path.iterdir()):
            yield from _everything_in(inner)
    yield path


def _settle(path: Path) -> None:
    os.chmod(path, DIRECTORY_MODE if path.is_dir() else FILE_MODE)
    _sync(path)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _remove(path: Path) -> None:
    remove: Callable[[Path], None] = shutil.rmtree if path.is_dir() else os.unlink
    with suppress(FileNotFoundError):
        remove(path)
