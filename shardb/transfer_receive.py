"""Receiving a commit into a store: what every copy into a path ends with.

Owns the order: lock, fast-forward check, objects copied and synced, then under the log's lock the
objects placed and one record appended, exactly as a transaction commits. The record keeps the
commit's id, step, state, metrics, statistics and recipe. Its parent is the target's head, as the
log demands; `origin_parent` is what it was at the source, and `rolled_up` holds the steps between.

A copy only ever moves a branch forward: its head must be an ancestor of the commit by the source's
history. What is interrupted leaves the target at its old head, and staged files for the next copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardb import branching, refs
from shardb.errors import ConflictError, LogDamagedError, SnapshotExistsError, StorageFullError
from shardb.layout import check_name
from shardb.publishing import place_objects
from shardb.records import Commit, Record, new_record
from shardb.state import Tables
from shardb.store import Store
from shardb.transfer_lineage import Lineage, lineage
from shardb.transfer_objects import ObjectIntake
from shardb.transfer_source import CommitSource
from shardb.transfer_tally import Tally

# Objects that retention took away while others were copied are copied in another round.
ROUNDS_MAX = 10
# The branch, impossible as a name, under which snapshots without a branch are received.
SNAPSHOT_KEY = "@snapshots"


class Unchecked:
    """The type of `UNCHECKED`: the caller does not say where the branch must be."""


UNCHECKED = Unchecked()
ExpectedHead = str | None | Unchecked


@dataclass(frozen=True, kw_only=True)
class Incoming:
    """A commit on its way: its record at the source, and where its objects are."""

    record: Record
    source: CommitSource

    @property
    def commit(self) -> Commit:
        return Commit.from_record(self.record)


def receive_commit(
    target: Store,
    incoming: Incoming,
    branch: str,
    *,
    expected_head: ExpectedHead = UNCHECKED,
    tally: Tally | None = None,
) -> Commit:
    """Make an incoming commit the head of a branch; nothing to do when the branch has it already.

    Returns the commit as the target has it: its parent is the head that was there.

    Raises ConflictError when the branch has steps that the commit does not come from, or is not at
    `expected_head` (a commit id, or None for no branch); BranchLockedError beside a writer;
    ObjectCorruptError, StorageFullError, StorageFailedError as a commit does.
    """
    check_name(branch, "branch")
    commit = incoming.commit
    with target.receiving(branch) as fresh:
        head = target.branches().get(branch)
        _check_expected(target, branch, head, expected_head)
        if head is not None and (there := _already_there(target, branch, head, commit)):
            return there
        between = _between(target, branch, head, incoming)
        if head is None and _is_on_a_branch(target, commit):
            return branching.create_branch(target, branch, commit.id)
        record = received_record(incoming, branch, head.id if head else None, between)
        intake = ObjectIntake(target, incoming.source, commit, branch, tally or Tally())
        _bring_and_append(
            target, intake, record, lambda tables: _check_branch(tables, record), fresh=fresh
        )
    return Commit.from_record(record)


def receive_snapshot(
    target: Store, incoming: Incoming, name: str, *, tally: Tally | None = None
) -> Commit:
    """Pin an incoming commit under a snapshot's name; its objects are copied where they lack.

    No branch moves. Raises SnapshotExistsError when the name pins another commit.
    """
    check_name(name, "snapshot")
    commit = incoming.commit
    with target.receiving(SNAPSHOT_KEY) as fresh:
        if target.index.read(lambda tables: _check_snapshot(tables, name, commit)):
            return commit
        if any(live.id == commit.id for live in target.commits()):
            return target.create_snapshot(name, commit.id)
        received = _copied(incoming, commit.branch, _origin_parent(incoming))
        record = new_record("snapshot", name=name, commit=commit.id, received=received)
        intake = ObjectIntake(target, incoming.source, commit, SNAPSHOT_KEY, tally or Tally())

        def check(tables: Tables) -> bool:
            _check_same_shards(tables, received)
            return _check_snapshot(tables, name, commit)

        _bring_and_append(target, intake, record, check, fresh=fresh)
    return commit


def _bring_and_append(
    target: Store,
    intake: ObjectIntake,
    record: Record,
    check: Callable[[Tables], bool],
    *,
    fresh: bool,
) -> None:
    """Copy, then place and append under the log's lock, where `check` says if it still may.

    It says True when the log has it already: an index that could not apply it has caught up.
    """
    commit = intake.commit
    try:
        intake.look_around(fresh=fresh)
        for _ in range(ROUNDS_MAX):
            intake.bring()
            with target.appender.exclusive("receiving a commit") as end:
                if intake.missing():
                    continue
                if target.index.read(check):
                    intake.leave()
                    return
                placed = place_objects(target, commit, intake.staged)
                try:
                    target.appender.append(end, record, commit_id=commit.id)
                except StorageFullError:
                    # Certainly not there: a full disk needs the space of what was placed.
                    target.objects.retire(placed)
                    raise
                return
        raise ConflictError(
            f"{target.root}: objects of step {commit.step} were retired as often as they were "
            "found; run the same command again"
        )
    except BaseException:
        intake.leave()
        raise


# Records


def received_record(
    incoming: Incoming, branch: str, parent: str | None, between: Lineage
) -> Record:
    """The commit record for a target whose branch is at `parent`."""
    rolled_up = [step.to_record() for step in between.steps]
    return {**_copied(incoming, branch, parent), "rolled_up": rolled_up}


def _copied(incoming: Incoming, branch: str, parent: str | None) -> Record:
    """A record of the known fields alone, with where the commit was first made."""
    return {
        **incoming.commit.to_record(),
        "branch": branch,
        "parent": parent,
        "origin_parent": _origin_parent(incoming),
        "origin_store": str(incoming.record.get("origin_store") or incoming.source.store_id),
    }


def _origin_parent(incoming: Incoming) -> str | None:
    parent = incoming.record.get("origin_parent", incoming.record["parent"])
    return None if parent is None else str(parent)


# Checks


def _check_expected(
    target: Store, branch: str, head: Commit | None, expected: ExpectedHead
) -> None:
    at = head.id if head else None
    if not isinstance(expected, Unchecked) and at != expected:
        raise ConflictError(
            f"{target.root}: branch {branch!r} is at {at or 'no commit'}, not at "
            f"{expected or 'no commit'} as expected; nothing was changed"
        )


def _already_there(target: Store, branch: str, head: Commit, commit: Commit) -> Commit | None:
    """The commit, if the branch is at it, or beyond it and it is still there.

    Raises ConflictError when the branch is beyond a commit whose objects are gone.
    """
    if head.id == commit.id:
        return head
    if commit.step >= head.step or not lineage(target, head.id, [commit.id]).reached:
        return None
    for live in target.commits():
        if live.id == commit.id:
            return live
    raise ConflictError(
        f"{target.root}: branch {branch!r} is beyond step {commit.step} already, at step "
        f"{head.step}; nothing was changed. Copy it beside with `--branch other`, or as a snapshot"
    )


def _between(target: Store, branch: str, head: Commit | None, incoming: Incoming) -> Lineage:
    """The steps from the target's head to the commit, or the error that says there is no way."""
    commit, source = incoming.commit, incoming.source
    found = source.lineage(commit.id, [head.id] if head else [])
    if head is None or found.reached:
        return found
    if not found.complete:
        raise LogDamagedError(
            f"{source.name}: a part of the log is lost, so that nobody can tell whether step "
            f"{commit.step} comes from step {head.step}, where branch {branch!r} of {target.root} "
            "is. Put the log segment back, or copy it beside with `--branch other`"
        )
    raise diverged(target.root, branch, head.step, head.id, incoming)


def diverged(where: str, branch: str, step: int, head: str, incoming: Incoming) -> ConflictError:
    """The error for a branch that has gone another way."""
    commit = incoming.commit
    return ConflictError(
        f"{where}: branch {branch!r} is at step {step} (commit {head}), from which step "
        f"{commit.step} (commit {commit.id}) of {incoming.source.name} does not come; nothing was "
        "changed. Copy it beside with `--branch other`"
    )


def _is_on_a_branch(target: Store, commit: Commit) -> bool:
    """Whether a branch keeps the commit: then its history is in the target's log."""
    return target.index.read(
        lambda tables: any(commit.id in row["retained"] for _, row in tables.items("branches"))
    )


def _check_branch(tables: Tables, record: Record) -> bool:
    """Under the log's lock: the record can be applied. A log must never hold one that cannot.

    True when it was.
    """
    name = record["branch"]
    row = tables.get("branches", name)
    if row is None:
        refs.check_new_branch(tables, name)
    _check_same_shards(tables, record)
    head = row["head"] if row else None
    if head not in (record["parent"], record["id"]):
        raise ConflictError(
            f"branch {name!r} moved while the commit was copied; run the same command again"
        )
    return bool(head == record["id"])


def _check_same_shards(tables: Tables, record: Record) -> None:
    known = tables.get("commits", record["id"])
    if known is not None and known["shards"] != record["shards"]:
        raise LogDamagedError(
            f"commit {record['id']} is known here with other shards; one of the two stores was "
            "tampered with. Run `shardb fsck` on both"
        )


def _check_snapshot(tables: Tables, name: str, commit: Commit) -> bool:
    """Whether the snapshot is there; ConflictError when the name is taken."""
    row = tables.get("snapshots", name)
    if row is None and tables.get("branches", name) is not None:
        raise ConflictError(f"{name!r} is a branch here; a snapshot of that name cannot be copied")
    if row is not None and row["commit"] != commit.id:
        raise SnapshotExistsError(
            f"snapshot {name!r} exists and pins commit {row['commit']}, not {commit.id} (step "
            f"{commit.step}); remove it first with `shardb rm`, or leave it out"
        )
    return row is not None
