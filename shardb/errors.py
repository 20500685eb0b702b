"""The error tree of the store, grouped by what the caller does next.

Every error carries `kind` (a stable word; the set only grows), `definite` (True when the operation
certainly did not happen) and `exit_code` (one table for every command, see `EXIT_CODES`).
This module knows nothing of files or formats.

ShardbError
├── UsageError              2  fix the call
│   └── IncompleteCommitError  stage what is missing
├── CorruptionError         3  the store cannot be read: `shardb fsck`, then `shardb repair`
│   ├── FormatError            not a store, or written by a newer version
│   ├── LogDamagedError        an invalid record with a valid one behind it
│   ├── LogTruncatedError      the log is shorter than the index knows
│   ├── ObjectCorruptError     bytes do not have the digest that names them
│   └── ObjectMissingError     a referenced object is not there
├── NotFoundError           4  look up what exists
├── ConflictError           5  somebody else was first
│   ├── BranchLockedError      another writer holds the branch
│   └── SnapshotExistsError    the name belongs to another commit
├── StorageFullError        6  free space, try again; the previous commit is intact
├── StorageFailedError      7  reopen the store before writing again
│   └── CommitUnknownError     reopen and look for the commit's id: it may have landed
└── RemoteFailedError       7  run the same command again: it goes on where it stopped
"""

from __future__ import annotations

from typing import ClassVar

EXIT_CODES: dict[int, str] = {
    0: "fine",
    1: "findings, or acknowledged data lost",
    2: "usage or bad input",
    3: "the store cannot be read or is corrupt",
    4: "not found",
    5: "conflict or locked (second writer)",
    6: "storage full",
    7: "storage failed",
    130: "interrupted (SIGINT); the step was committed first",
    143: "terminated (SIGTERM); the step was committed first",
}


class ShardbError(Exception):
    """The operation failed; the message says what to do."""

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1
    definite: bool = True

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.path = path

    def to_json(self) -> dict[str, str | None]:
        """What a script reads of an error."""
        return {"kind": self.kind, "path": self.path, "message": self.message}


class UsageError(ShardbError):
    """The call or its arguments are wrong."""

    kind = "usage"
    exit_code = 2


class IncompleteCommitError(UsageError):
    """A trainable shard was not staged: committing would mix two steps."""

    kind = "incomplete_commit"


class CorruptionError(ShardbError):
    """Stored bytes are not what was written."""

    kind = "corruption"
    exit_code = 3


class FormatError(CorruptionError):
    """The directory is no store, or of a format this version cannot read."""

    kind = "format"


class LogDamagedError(CorruptionError):
    """The log has an invalid record with a valid one behind it."""

    kind = "log_damaged"

    def __init__(self, message: str, *, path: str | None = None, offset: int = 0) -> None:
        super().__init__(message, path=path)
        self.offset = offset


class LogTruncatedError(CorruptionError):
    """The log is shorter than the index knows."""

    kind = "log_truncated"


class ObjectCorruptError(CorruptionError):
    """An object's bytes do not have the digest that names them."""

    kind = "object_corrupt"


class ObjectMissingError(CorruptionError):
    """A referenced object is not in the store."""

    kind = "object_missing"


class NotFoundError(ShardbError):
    """No such branch, snapshot, step, commit, shard or store."""

    kind = "not_found"
    exit_code = 4


class ConflictError(ShardbError):
    """Somebody else was first."""

    kind = "conflict"
    exit_code = 5


class BranchLockedError(ConflictError):
    """Another writer holds the branch."""

    kind = "branch_locked"


class SnapshotExistsError(ConflictError):
    """The snapshot name belongs to another commit."""

    kind = "snapshot_exists"


class StorageFullError(ShardbError):
    """There is no space; the previous commit is intact."""

    kind = "storage_full"
    exit_code = 6


class StorageFailedError(ShardbError):
    """The storage reported a failure; the store refuses writes until it is reopened."""

    kind = "storage_failed"
    exit_code = 7


class CommitUnknownError(StorageFailedError):
    """The commit record was being written when the storage failed: it may or may not be there."""

    kind = "commit_unknown"
    definite = False

    def __init__(self, message: str, *, commit_id: str, path: str | None = None) -> None:
        super().__init__(message, path=path)
        self.commit_id = commit_id


class RemoteFailedError(ShardbError):
    """The object storage, or the network to it, failed; the stores at both ends are intact."""

    kind = "remote_failed"
    exit_code = 7
