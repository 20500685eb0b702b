"""What a check of a store finds.

Owns the form of a finding and of the report; `kind` is a stable word, and the set only grows (see
`KINDS`). Knows nothing of how anything is checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from shlex import quote
from typing import Any, Literal

Severity = Literal["error", "warning", "info"]

# An error means that committed bytes are lost or wrong, or that the store may be refused. A warning
# is something that the next opening mends by itself. An info is a leftover that only takes space.
KINDS: dict[str, str] = {
    "format_damaged": "FORMAT is not as it was written, or missing",
    "format_foreign": "FORMAT and the log carry different store ids",
    "log_missing": "a segment of the log is not there",
    "log_damaged": "bytes of the log are no record, and records follow behind them",
    "log_chain_broken": "a record of the log does not follow the one before it",
    "log_record_garbled": "a record of the log is whole, but its content makes no sense",
    "log_truncated": "the log ends before what the index has applied",
    "log_unreadable": "the storage refuses to read a segment of the log",
    "log_torn_tail": "the last record was being written when the writer died",
    "checkpoint_differs": "a checkpoint says something else than the records before it",
    "index_missing": "there is no index; opening the store makes it from the log",
    "index_behind": "the index has not applied the last records; opening the store does",
    "index_unreadable": "the index is no sound database; opening the store makes a new one",
    "index_foreign": "the index is of another store than FORMAT and the log",
    "index_differs": "the index says something else than the log",
    "directory_missing": "a directory of the store is not there; opening the store makes it",
    "directory_elsewhere": "objects/ is on another file system than spare/: nothing can be written",
    "object_missing": "an object that a commit needs is not there",
    "object_corrupt": "the bytes of an object are not those that were committed",
    "object_malformed": "an object's header does not describe tensors",
    "object_unreadable": "the storage refuses to read an object",
    "object_unreferenced": "no commit needs this object",
    "object_duplicate": "the image of an object that is stored packed is still there",
    "staged_leftover": "a transaction ended without a commit and left its file",
    "spare_misnamed": "a file kept for reuse has not the size that its name says",
    "partial_file": "a file was being written beside its place when its writer died",
    "lease_of_dead_reader": "the reader that held this lease is gone",
    "index_set_aside": "an unreadable index was moved out of the way earlier",
    "log_acknowledged": "a part of the log is lost, which a repair has acknowledged",
    "damaged_set_aside": "damaged bytes that a repair has kept, for whoever can read them",
    "place_taken": "something else lies where the store keeps a file or a directory",
    "shared_file": "another directory has this file too; opening the store makes it its own",
    "foreign_file": "a file that the store did not make",
}


def command(verb: str, root: str) -> str:
    """A command on a store, as it can be typed."""
    return f"shardb {verb} {quote(root)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that is not as it should be.

    `offset` is in bytes from the start of the file, where it is known. `branches`, `steps` and
    `snapshots` are those that need what is damaged; `nearest_intact_step` is the retained step
    closest to them that does not, and `nearest_intact_branch` its branch where those hit are of
    others too. `next_command` is what to type, or None.
    """

    kind: str
    severity: Severity
    path: str
    offset: int | None = None
    expected: str | None = None
    found: str | None = None
    shards: tuple[str, ...] = ()
    branches: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()
    snapshots: tuple[str, ...] = ()
    nearest_intact_step: int | None = None
    nearest_intact_branch: str | None = None
    next_command: str | None = None

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "severity": self.severity,
            "path": self.path,
            "offset": self.offset,
            "expected": self.expected,
            "found": self.found,
            "shards": list(self.shards),
            "branches": list(self.branches),
            "steps": list(self.steps),
            "snapshots": list(self.snapshots),
            "nearest_intact_step": self.nearest_intact_step,
            "nearest_intact_branch": self.nearest_intact_branch,
            "next_command": self.next_command,
        }


@dataclass(kw_only=True)
class Report:
    """Everything that one check found, and how much it looked at.

    `complete` is False when a budget ended the check before every object was read.
    """

    findings: list[Finding] = field(default_factory=list)
    objects_checked: int = 0
    bytes_checked: int = 0
    seconds: float = 0.0
    complete: bool = True

    @property
    def has_errors(self) -> bool:
        return any(finding.severity == "error" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {
            "findings": [finding.to_json() for finding in self.findings],
            "objects_checked": self.objects_checked,
            "bytes_checked": self.bytes_checked,
            "seconds": self.seconds,
            "complete": self.complete,
        }
