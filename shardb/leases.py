"""Leases: a live reader's pin on a commit.

Owns `leases/`: one file a reader, named `<commit>.<unique>` and held with flock. The file's name
and its lock are the truth, so a lease needs no space on a full disk, and a dead owner is
recognised by its released lock, whatever killed it.

A reader takes its lock first, and then checks inside an index write transaction that the commit is
still live; retiring reads the leases inside the write transaction that retires. One of the two
comes first, always.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shardb.errors import LogDamagedError
from shardb.filesystem import (
    CREATE,
    EXCLUSIVE,
    READ,
    WRITE,
    FileSystem,
    close_quietly,
    list_if_there,
    opened,
    write_all,
)

COMMIT_PATTERN = re.compile(r"[0-9a-f]{32}")
LEASE_PATTERN = re.compile(r"^[0-9a-f]{32}\.[0-9a-f]{16}$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """A held lease: close it with `Leases.release`."""

    commit: str
    path: str
    file: int
    inode: int | None


class Leases:
    """The lease files of one store."""

    def __init__(self, files: FileSystem, root: str) -> None:
        self._files = files
        self.directory = f"{root}/leases"
        self._held: dict[str, Lease] = {}

    def take(self, commit: str) -> Lease:
        """Create and lock a lease file. The caller then checks that the commit is live."""
        if not COMMIT_PATTERN.fullmatch(commit):
            raise LogDamagedError(f"{commit!r} in the log is no commit's id")  # nor a file's name
        path = f"{self.directory}/{commit}.{os.urandom(8).hex()}"
        file = self._files.open(path, WRITE | CREATE | EXCLUSIVE)
        try:
            self._files.lock(file, exclusive=True, blocking=True)
            inode = self._inode(path)
            self._describe(file)
        except BaseException:
            close_quietly(self._files, file)
            raise
        lease = Lease(commit=commit, path=path, file=file, inode=inode)
        self._held[path] = lease
        return lease

    def _inode(self, path: str) -> int | None:
        """The inode of a lease file; None when it was taken for a dead one before it was locked."""
        try:
            return self._files.status(path).inode
        except FileNotFoundError:
            return None

    def _describe(self, file: int) -> None:
        """Say who holds the lease. Only for people: a full disk must not stop a reader."""
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
        try:
            write_all(self._files, file, json.dumps(owner).encode(), 0)
        except OSError:
            return

    def still_there(self, lease: Lease) -> bool:
        """Whether nobody took the lease for a dead one between its creation and its lock."""
        return lease.inode is not None and self._inode(lease.path) == lease.inode

    def release(self, lease: Lease) -> None:
        """Give a lease up; does nothing when it was given up already.

        It never fails: the lock goes with the descriptor, and a file that could not be removed is
        recognised by it as a dead one's.
        """
        if self._held.pop(lease.path, None) is None:
            return
        with suppress(OSError):
            self._files.unlink(lease.path)
        close_quietly(self._files, lease.file)

    def release_all(self) -> None:
        """Give up every lease that this store still holds."""
        for lease in list(self._held.values()):
            self.release(lease)

    def abandon(self) -> None:
        """In a forked child: the leases stay the parent's, and must not outlive it."""
        for lease in self._held.values():
            close_quietly(self._files, lease.file)
        self._held.clear()

    def leased_commits(self) -> set[str]:
        """Commits with a live lease. Leases of dead owners are removed on the way."""
        return {name.split(".")[0] for name in self._names() if self._is_alive(name)}

    def describe_all(self) -> list[dict[str, Any]]:
        """Live leases with their owners, for people; removes nothing."""
        found: list[dict[str, Any]] = []
        for name in self._names():
            path = f"{self.directory}/{name}"
            try:
                with opened(self._files, path, READ) as file:
                    if self._files.lock(file, exclusive=False, blocking=False):
                        continue
                    text = self._files.pread(file, 4096, 0)
            except OSError:
                continue
            found.append({"commit": name.split(".")[0], **_owner(text)})
        return found

    def _names(self) -> list[str]:
        names = list_if_there(self._files, self.directory)
        return [name for name in names if LEASE_PATTERN.match(name)]

    def _is_alive(self, name: str) -> bool:
        """Whether somebody holds a lease; one that cannot be asked counts as held."""
        path = f"{self.directory}/{name}"
        try:
            with opened(self._files, path, READ) as file:
                if not self._files.lock(file, exclusive=True, blocking=False):
                    return True
                self._files.unlink(path)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False


def _owner(text: bytes) -> dict[str, Any]:
    try:
        owner = json.loads(text)
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}
