"""The locks of a store, all flock(2), all under `locks/`.

`wal`: held for the moment of an append or a catch-up. `index`: held shared by every process that
has the index open, so that one that comes alone knows it is alone. `branch-<name>`: held by the
writer of a branch; its content says who that is. A lock dies with its owner: a forked child
gives up its copies at once, so that it cannot hold them for a dead parent.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardb.errors import BranchLockedError, ConflictError
from shardb.filesystem import (
    CREATE,
    READ,
    WRITE,
    FileSystem,
    close_quietly,
    closing,
    list_if_there,
    opened,
    write_all,
)
from shardb.objects import branch_token

TAKE_ATTEMPTS = 5
TAKE_PAUSE_SECONDS = 0.01
WAIT_SECONDS_MAX = 60.0
WAIT_PAUSE_SECONDS_MIN = 0.0002
WAIT_PAUSE_SECONDS_MAX = 0.02


class Locks:
    """The lock files of one store."""

    def __init__(self, files: FileSystem, root: str) -> None:
        self._files = files
        self.directory = f"{root}/locks"
        self.wait_seconds_max = WAIT_SECONDS_MAX
        self._branches: dict[str, int] = {}
        self._wal: int | None = None
        self._index: int | None = None
        # flock(2) keeps processes apart; threads of this one share the descriptor, and the lock.
        self._wal_of_thread = threading.Lock()

    def _open(self, name: str) -> int:
        return self._files.open(f"{self.directory}/{name}", WRITE | CREATE)

    @contextmanager
    def wal(self) -> Iterator[None]:
        """Hold the log's lock for a block, against other processes and other threads."""
        with self._wal_of_thread:
            if self._wal is None:
                self._wal = self._open("wal")
            self._wait_for_wal(self._wal)
            try:
                yield
            finally:
                self._files.unlock(self._wal)

    def _wait_for_wal(self, file: int) -> None:
        """Take the log's lock; ConflictError names who has held it for far too long.

        It is held for moments. Somebody who keeps it is stopped (SIGSTOP), or hangs in a system
        call, and waiting for him silently would hang everybody.
        """
        pause = WAIT_PAUSE_SECONDS_MIN
        deadline = time.monotonic() + self.wait_seconds_max
        while not self._files.lock(file, exclusive=True, blocking=False):
            if time.monotonic() > deadline:
                path = f"{self.directory}/wal"
                raise ConflictError(
                    f"{path}: {self._files.lock_holder(path)} has held the log's lock for more "
                    f"than {self.wait_seconds_max:.0f} s; it may be stopped: let it go on "
                    "(kill -CONT) or end it, then try again",
                    path=path,
                )
            time.sleep(pause)
            pause = min(2 * pause, WAIT_PAUSE_SECONDS_MAX)

    def share_index(self) -> bool:
        """Take the index's lock; True when no other process has the index open."""
        if self._index is None:
            self._index = self._open("index")
        return self._files.lock(self._index, exclusive=True, blocking=False)

    def settle_index(self) -> None:
        """Let others open the index too."""
        assert self._index is not None
        self._files.lock(self._index, exclusive=False, blocking=True)

    def take_branch(self, branch: str) -> None:
        """Become the writer of a branch; BranchLockedError names the one who is."""
        if branch in self._branches:
            return
        path = f"{self.directory}/branch-{branch_token(branch)}"
        file = self._files.open(path, WRITE | CREATE)
        try:
            if not self._lock_branch(file):
                raise BranchLockedError(
                    f"branch {branch!r} already has a writer: {self._owner_text(file)}. Wait for "
                    "it, stop it, or write to another branch",
                    path=path,
                )
            self._describe(file)
        except BaseException:
            close_quietly(self._files, file)
            raise
        self._branches[branch] = file

    def _lock_branch(self, file: int) -> bool:
        """Try a few times: somebody who only asks whether there is a writer lets go at once."""
        for attempt in range(TAKE_ATTEMPTS):
            if self._files.lock(file, exclusive=True, blocking=False):
                return True
            if attempt + 1 < TAKE_ATTEMPTS:
                time.sleep(TAKE_PAUSE_SECONDS)
        return False

    def holds_branch(self, branch: str) -> bool:
        """Whether this store is the writer of a branch."""
        return branch in self._branches

    def branch_is_locked(self, branch: str) -> bool:
        """Whether any process writes to a branch."""
        if branch in self._branches:
            return True
        path = f"{self.directory}/branch-{branch_token(branch)}"
        if not self._files.exists(path):
            return False
        file = self._files.open(path, WRITE)
        with closing(self._files, file, written=False):
            return not self._files.lock(file, exclusive=False, blocking=False)

    def writers(self) -> list[dict[str, Any]]:
        """Branches that somebody writes to now, with the owners, for people.

        A lock that cannot be asked is left out: `begin` and a check say what is wrong with it.
        """
        found: list[dict[str, Any]] = []
        for name in list_if_there(self._files, self.directory):
            if not name.startswith("branch-"):
                continue
            try:
                with opened(self._files, f"{self.directory}/{name}", READ) as file:
                    if self._files.lock(file, exclusive=False, blocking=False):
                        continue
                    text = self._files.pread(file, 4096, 0)
            except OSError:
                continue
            branch = name.removeprefix("branch-").replace("@", "/")
            found.append({"branch": branch, **_owner(text)})
        return found

    def release_branch(self, branch: str) -> None:
        file = self._branches.pop(branch, None)
        if file is not None:
            close_quietly(self._files, file)

    def close(self) -> None:
        """Give up every lock; in a forked child only its copies of the descriptors."""
        for branch in list(self._branches):
            self.release_branch(branch)
        for file in (self._wal, self._index):
            if file is not None:
                close_quietly(self._files, file)
        self._wal = self._index = None

    def _describe(self, file: int) -> None:
        """Say who holds the lock. Only for people: a full disk must not stop a writer here."""
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "started": time.time()}
        try:
            self._files.truncate(file, 0)
            write_all(self._files, file, json.dumps(owner).encode(), 0)
        except OSError:
            return

    def _owner_text(self, file: int) -> str:
        try:
            owner: dict[str, Any] = json.loads(self._files.pread(file, 4096, 0))
            started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner["started"]))
            return f"process {owner['pid']} on host {owner['host']}, since {started}"
        except (ValueError, KeyError, TypeError, OSError):
            return "a process that did not leave its name"


def _owner(text: bytes) -> dict[str, Any]:
    try:
        owner = json.loads(text)
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}
