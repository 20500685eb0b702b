"""A directory appears whole or not at all: built beside its place, synced, put there in one step.

Owns the partial directory, its lock, and the exchange with what stood there before. A process that
is killed at any moment leaves the old directory, or none; what it had built lies beside as
`NAME.partial-...` and is removed by the next one. Replacing removes nothing that is not a prepared
data set. It does not know what is in the files.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardb.errors import ConflictError, StorageFailedError
from shardb.listing import listed
from trainer.data.manifest import MANIFEST_NAME, SPLITS, TOKENIZER_NAME, load_manifest
from trainer.errors import InputError

_OWN_NAMES: Final = frozenset({MANIFEST_NAME, TOKENIZER_NAME, *SPLITS})
_MARK: Final = ".partial-"
_LOCK_ATTEMPTS = 10
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@dataclass(frozen=True, kw_only=True)
class PartialDirectory:
    """A directory that nobody else sees as finished."""

    path: Path
    target: Path
    overwrite: bool

    def publish(self) -> None:
        """Sync everything and put it in its place; what stood there is removed afterwards.

        What stands there is looked at again: it may not be what it was when the work began.
        """
        for folder, _, names in os.walk(self.path, topdown=False):
            for name in names:
                _sync(Path(folder) / name)
            _sync(Path(folder))
        refuse_target(self.target, overwrite=self.overwrite)
        if self.target.exists():
            _exchange(self.path, self.target)
        else:
            self.path.rename(self.target)
        try:
            _sync(self.target.parent)
        except OSError as error:
            raise StorageFailedError(
                f"{self.target}: complete and in its place, but its folder cannot be synced "
                f"({error.strerror}): it may be gone after a power failure; check the disk",
                path=str(self.target),
            ) from error


def refuse_target(out: Path, *, overwrite: bool) -> Path:
    """Return the real path of `out`, or refuse it before any work is done.

    ConflictError when it is there and `overwrite` is not given; InputError when replacing it would
    remove something that is no prepared data set.
    """
    target = Path(os.path.realpath(out))
    if not target.exists():
        return target
    if not target.is_dir():
        raise InputError(f"{out}: not a directory; give --out another name")
    names = set(os.listdir(target))
    if not overwrite:
        what = "an empty directory" if not names else "there already"
        raise ConflictError(f"{out}: {what}; give another --out, or --overwrite to replace it")
    foreign = sorted(names - _OWN_NAMES)
    if foreign:
        raise InputError(
            f"{out}: holds {listed(foreign, most=5)}, which no prepared data set has; "
            "--overwrite would remove it: give another --out, or move it away"
        )
    if names and (MANIFEST_NAME not in names or load_manifest(target / MANIFEST_NAME) is None):
        raise InputError(f"{out}: not a prepared data set; --overwrite would remove it")
    return target


@contextmanager
def partial_directory(target: Path, *, overwrite: bool = False) -> Iterator[PartialDirectory]:
    """Make a partial directory beside `target`; whatever is left of it at the end is removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(target)
    path, lock = _locked_directory(target)
    try:
        yield PartialDirectory(path=path, target=target, overwrite=overwrite)
    finally:
        # After a publication the name is free, or holds what stood in the place before.
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _locked_directory(target: Path) -> tuple[Path, int]:
    """Make a directory and hold its lock: the sign of life that the kernel drops with us."""
    for _ in range(_LOCK_ATTEMPTS):
        path = target.with_name(f"{target.name}{_MARK}{os.getpid()}-{secrets.token_hex(4)}")
        path.mkdir()
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return path, lock
        os.close(lock)  # Another process took it for abandoned before it was locked.
    raise ConflictError(f"{target}: other processes prepare the same directory; wait for them")


def remove_abandoned(target: Path) -> list[Path]:
    """Remove partial directories of `target` whose makers are gone; return what was removed."""
    removed = []
    prefix = target.name + _MARK
    for name in sorted(os.listdir(target.parent)):
        path = target.parent / name
        if not name.startswith(prefix) or path.is_symlink() or not path.is_dir():
            continue
        with suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
            finally:
                os.close(lock)
    return removed


def _exchange(partial: Path, target: Path) -> None:
    """Swap two directories: in one step where the system can, else with a moment of neither."""
    if _exchange_in_one_step(partial, target):
        return
    aside = partial.with_name(partial.name + "-before")
    target.rename(aside)
    partial.rename(target)
    aside.rename(partial)


def _exchange_in_one_step(partial: Path, target: Path) -> bool:
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    names = os.fsencode(partial), os.fsencode(target)
    if rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(target))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
