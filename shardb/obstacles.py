"""What lies in the place of a store's files: a directory, a file, a link that leads nowhere.

Owns the places that are looked at, and which of them a store can do without. Changes nothing. What
is wrong with the content of a file is not asked here; a missing one is no obstacle. An object, and
a log segment that is a directory, are named by the checks that read them.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from shardb.filesystem import (
    READ,
    READ_PIECE_BYTES,
    FileSystem,
    leads_nowhere,
    list_if_there,
    opened,
)
from shardb.format import DIRECTORIES
from shardb.log import SEGMENT_PATTERN

LINK = "a link that leads nowhere"
NEEDED_DIRECTORIES = ("wal", "objects")
# What a trainer writes beside a store, and refuses to begin without.
TRAINER_LOGS = "logs"
# By directory, the names that the store makes in it. Segments of the log are looked for as well.
OWN_NAMES = {
    "wal": re.compile(r"\.partial$"),
    "objects": re.compile(r"\.partial$"),
    "spare": re.compile(r"^(free|staged|held)\."),
    "index": re.compile(r"^(data|lock)\.mdb$"),
    "leases": re.compile(r"^[0-9a-f]{32}\."),
    "locks": re.compile(r"^(wal|index|branch-.+)$"),
    TRAINER_LOGS: re.compile(r"^steps\.jsonl$"),
}
# With one of these taken, nothing else of a store can be looked at.
_IN_EVERY_WAY = (*DIRECTORIES, "locks/wal", "index/data.mdb")


@dataclass(frozen=True, kw_only=True, slots=True)
class Obstacle:
    """Something else in the place `name`, below the store; `is_needed` if content belongs there."""

    name: str
    expected: str
    found: str
    is_needed: bool

    @property
    def hides_the_store(self) -> bool:
        return self.name in _IN_EVERY_WAY


def obstacle_at(files: FileSystem, path: str, *, directory: bool = False) -> str | None:
    """What lies at a path that is no file, or no directory, in words; None when nothing does."""
    try:
        is_directory = files.status(path).is_directory
    except FileNotFoundError:
        return LINK if leads_nowhere(files, path) else None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return LINK
    if is_directory == directory:
        return None
    return "a directory" if is_directory else "a file"


def find_obstacles(files: FileSystem, root: str) -> list[Obstacle]:
    """Everything that lies in a place of the store, FORMAT and objects apart."""
    return list(_find(files, root))


def check_readable(files: FileSystem, root: str) -> None:
    """Raise PermissionError for a file of the log, the index or an object that is not to be read.

    Its bytes may be whole: nothing is lost before somebody who may read it has looked. So are those
    of a part of the log at which the disk fails: OSError.
    """
    for name in ("wal", "index", "objects"):
        for entry in list_if_there(files, f"{root}/{name}"):
            path = f"{root}/{name}/{entry}"
            try:
                with opened(files, path, READ) as file:
                    if name == "wal":
                        _read_through(files, file, path)
            except PermissionError:
                raise
            except OSError as error:
                if name == "wal" and error.errno == errno.EIO:
                    raise
                continue  # whoever reads it names that


def _read_through(files: FileSystem, file: int, path: str) -> None:
    """Read a file to its end, or say at which path that failed."""
    offset = 0
    try:
        while part := files.pread(file, READ_PIECE_BYTES, offset):
            offset += len(part)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


def _find(files: FileSystem, root: str) -> Iterator[Obstacle]:
    for name in DIRECTORIES:
        yield from _in_directory(files, root, name)
    yield from _at(files, root, "reserve")
    with suppress(PermissionError):  # the store has no need of them
        yield from _in_directory(files, root, TRAINER_LOGS)


def _in_directory(files: FileSystem, root: str, name: str) -> Iterator[Obstacle]:
    """What is in the place of a directory, or else of the files in it."""
    found = obstacle_at(files, f"{root}/{name}", directory=True)
    if found is not None:
        needed = name in NEEDED_DIRECTORIES
        yield Obstacle(name=name, expected="a directory", found=found, is_needed=needed)
        return
    for entry in list_if_there(files, f"{root}/{name}"):
        yield from _at(files, root, f"{name}/{entry}")


def _at(files: FileSystem, root: str, name: str) -> Iterator[Obstacle]:
    """What is in the place of a file, if it is a place of the store's."""
    directory, _, entry = name.rpartition("/")
    is_segment = directory == "wal" and SEGMENT_PATTERN.match(entry) is not None
    if directory and not is_segment and not OWN_NAMES[directory].search(entry):
        return
    found = obstacle_at(files, f"{root}/{name}")
    if found is not None and (found == LINK or not is_segment):
        yield Obstacle(name=name, expected="a file", found=found, is_needed=is_segment)
