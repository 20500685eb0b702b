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
import socket
import time
from dataclasses import dataclass
from typing import Any

from shardb.filesystem import CREATE, EXCLUSIVE, READ, WRITE, FileSystem, opened, write_all


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """A held lease: close it with `Leases.release`."""

    commit: str
    path: str
    file: int
    inode: int


class Leases:
    """The lease files of one store."""

    def __init__(self, files: FileSystem, root: str) -> None:
        self._files = files
        self.directory = f"{root}/leases"

    def take(self, commit: str) -> Lease:
        """Create and lock a lease file. The caller then checks that the commit is live."""
        path = f"{self.directory}/{commit}.{os.urandom(8).hex()}"
        file = self._files.open(path, WRITE | CREATE | EXCLUSIVE)
        try:
            self._files.lock(file, exclusive=True, blocking=True)
            inode = self._files.status(path).inode
            self._describe(file)
        except BaseException:
            self._files.close(file)
            raise
        return Lease(commit=commit, path=path, file=file, inode=inode)

    def _describe(self, file: int) -> None:
        """Say who holds the lease. Only for people: a full disk must not stop a reader."""
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
        try:
            write_all(self._files, file, json.dumps(owner).encode(), 0)
        except OSError:
            return

    def still_there(self, lease: Lease) -> bool:
        """Whether nobody took the lease for a dead one between its creation and its lock."""
        try:
            return self._files.status(lease.path).inode == lease.inode
        except FileNotFoundError:
            return False

    def release(self, lease: Lease) -> None:
        """Give a lease up."""
        try:
            self._files.unlink(lease.path)
        except FileNotFoundError:
            pass
        finally:
            self._files.close(lease.file)

    def leased_commits(self) -> set[str]:
        """Commits with a live lease. Leases of dead owners are removed on the way."""
        return {name.split(".")[0] for name in self._names() if self._alive(name)}

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
        return self._files.list(self.directory)

    def _alive(self, name: str) -> bool:
        path = f"{self.directory}/{name}"
        try:
            with opened(self._files, path, READ) as file:
                if not self._files.lock(file, exclusive=True, blocking=False):
                    return True
                self._files.unlink(path)
        except FileNotFoundError:
            return False
        return False


def _owner(text: bytes) -> dict[str, Any]:
    try:
        owner = json.loads(text)
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}
