"""Names of commits, and the one resolver for them.

A REF is a commit's whole id, a snapshot, a branch, `step-N` (the retained commit of step N: on
`main` if it is there, else on the one branch that has it), or the beginning of an id, of at least 4
characters: looked for in this order, so no name hides a commit whose id is given. No REF means the
head of `main`. Owns the one error that says what exists instead.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardb.errors import ConflictError, NotFoundError, UsageError
from shardb.listing import last_listed, listed
from shardb.records import Commit
from shardb.state import DEFAULT_BRANCH, Tables

STEP_PATTERN = re.compile(r"^step-([0-9]{1,18})\Z")
ID_PATTERN = re.compile(r"^[0-9a-fA-F]{32}\Z")
HEX_PATTERN = re.compile(r"^[0-9a-fA-F]+\Z")
PREFIX_LENGTH_MIN = 4
SHOWN_MAX = 12


def branch_heads(tables: Tables) -> dict[str, Commit]:
    """Branch names and their heads."""
    return {name: _commit(tables, row["head"]) for name, row in tables.items("branches")}


def snapshot_commit(tables: Tables, name: str) -> Commit | None:
    """The commit of one snapshot, without looking at the others; None when there is no such."""
    row = tables.get("snapshots", name)
    return None if row is None else _commit(tables, row["commit"])


def snapshot_commits(tables: Tables) -> dict[str, Commit]:
    """Snapshot names and the commits they pin."""
    return {name: _commit(tables, row["commit"]) for name, row in tables.items("snapshots")}


def live_commits(tables: Tables) -> list[Commit]:
    """Retained commits, oldest first; those kept only by a lease are not among them."""
    condemned = {key for key, _ in tables.items("condemned")}
    commits = [Commit.from_record(r) for key, r in tables.items("commits") if key not in condemned]
    return sorted(commits, key=lambda commit: (commit.step, commit.time))


def resolve(tables: Tables, ref: str | None, *, branch: str = DEFAULT_BRANCH) -> Commit:
    """The retained commit that `ref` names; a step is looked for on `branch` first.

    Raises NotFoundError with near matches, UsageError when several commits fit.
    """
    if ref is None:
        ref = DEFAULT_BRANCH
        if tables.get("branches", ref) is None:
            raise NotFoundError("the store has no commit yet; start a run with `train --store …`")
    if ID_PATTERN.match(ref) and (whole := _live(tables, ref)) is not None:
        return whole
    snapshot, row = tables.get("snapshots", ref), tables.get("branches", ref)
    if snapshot is not None:
        return _commit(tables, snapshot["commit"])
    if row is not None:
        return _commit(tables, row["head"])
    match = STEP_PATTERN.match(ref)
    if match:
        return commit_of_step(tables, int(match.group(1)), branch=branch)
    found = [c for c in live_commits(tables) if _is_prefix(ref, c.id)]
    if len(found) > 1:
        raise UsageError(f"{ref!r} is the beginning of {len(found)} commit ids; give more of it")
    if found:
        return found[0]
    names = [name for table in ("branches", "snapshots") for name, _ in tables.items(table)]
    steps = [f"step-{commit.step}" for commit in live_commits(tables)]
    raise NotFoundError(no_such("branch, snapshot, step or commit", ref, [*names, *steps]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A commit named in one way: the name of a branch is not looked up among snapshots."""

    ref: str | None = None
    branch: str | None = None
    snapshot: str | None = None
    step: int | None = None
    commit: str | None = None

    def __post_init__(self) -> None:
        """Refuse two names at once: they could contradict each other."""
        given = [name for name in self.__slots__ if getattr(self, name) is not None]
        if len(given) > 1:
            raise UsageError(f"a commit is named in one way, not by {' and '.join(given)}")

    def find(self, tables: Tables) -> Commit:
        """The retained commit; NotFoundError with near matches."""
        if self.branch is not None:
            return _named("branch", self.branch, branch_heads(tables))
        if self.snapshot is not None:
            found = snapshot_commit(tables, self.snapshot)
            return found or _named("snapshot", self.snapshot, snapshot_commits(tables))
        if self.commit is not None:
            return _named("commit", self.commit, {c.id: c for c in live_commits(tables)})
        if self.step is not None:
            return commit_of_step(tables, self.step)
        return resolve(tables, self.ref)


def _named(what: str, name: str, known: Mapping[str, Commit]) -> Commit:
    if name not in known:
        raise NotFoundError(no_such(what, name, known))
    return known[name]


def commit_of_step(tables: Tables, step: int, *, branch: str = DEFAULT_BRANCH) -> Commit:
    """The retained commit of a step; NotFoundError lists the steps that are retained.

    A commit of the branch's own line goes before others, and anything before what a rewind left.
    """
    live = live_commits(tables)
    found = [commit for commit in live if commit.step == step]
    abandoned = {key for key, _ in tables.items("abandoned")}
    found = [commit for commit in found if commit.id not in abandoned] or found
    row = tables.get("branches", branch)
    line = set(row["retained"]) if row else set()
    on_main = [c for c in found if c.id in line] or [c for c in found if c.branch == branch]
    if len(found) > 1 and len(on_main) != 1:
        raise UsageError(
            f"step {step} is retained on several branches; name one of the commits "
            f"{', '.join(commit.id for commit in found)}"
        )
    if not found:
        steps = sorted({commit.step for commit in live})
        shown = last_listed(steps, most=SHOWN_MAX) or "none"
        raise NotFoundError(f"step {step} is not retained; retained steps: {shown}")
    return (on_main or found)[0]


def snapshot_target(tables: Tables, name: str, ref: str | None) -> Commit:
    """The commit that a snapshot of this name pins; UsageError when name and ref contradict."""
    match = STEP_PATTERN.match(name)
    if match is None:
        commit = resolve(tables, ref)
        _check_hides_none(tables, name, commit)
        return commit
    existing = tables.get("snapshots", name)
    if existing is not None and ref is None:
        return _commit(tables, existing["commit"])
    step = int(match.group(1))
    commit = commit_of_step(tables, step) if ref is None else resolve(tables, ref)
    if commit.step != step:
        raise UsageError(
            f"a snapshot named {name!r} pins step {step}, but {ref!r} is step {commit.step}; "
            "choose another name"
        )
    return commit


def check_new_branch(tables: Tables, name: str) -> None:
    """Raise UsageError or ConflictError when a new branch of this name would hide something."""
    if STEP_PATTERN.match(name):
        raise UsageError(f"branch {name!r}: names of the form step-N mean steps; choose another")
    if tables.get("snapshots", name) is not None:
        raise ConflictError(f"{name!r} is a snapshot; choose another name for the branch")
    _check_hides_none(tables, name, None)


def _check_hides_none(tables: Tables, name: str, meant: Commit | None) -> None:
    """Refuse a name that reads as the id of another commit than the one it is for."""
    if ID_PATTERN.match(name):
        raise UsageError(f"{name!r} has the form of a commit id; choose another name")
    if not HEX_PATTERN.match(name):
        return
    hidden = [c for c in live_commits(tables) if _is_prefix(name, c.id)]
    if any(meant is None or commit.id != meant.id for commit in hidden):
        raise UsageError(
            f"{name!r} is the beginning of commit {hidden[0].id} (step {hidden[0].step}), which it "
            "would hide; choose another name"
        )


def no_such(what: str, name: str, existing: Iterable[str]) -> str:
    """The message for a name that does not exist."""
    known = list(dict.fromkeys(existing))
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if near:
        return f"there is no {what} {name!r}; did you mean {' or '.join(near)}?"
    return f"there is no {what} {name!r}; there are: {listed(known, most=SHOWN_MAX) or 'none'}"


def _is_prefix(ref: str, commit: str) -> bool:
    return len(ref) >= PREFIX_LENGTH_MIN and commit.startswith(ref.lower())


def _live(tables: Tables, commit: str) -> Commit | None:
    """A retained commit by its whole id."""
    key = commit.lower()
    is_there = tables.get("commits", key) is not None and tables.get("condemned", key) is None
    return _commit(tables, key) if is_there else None


def _commit(tables: Tables, commit: str) -> Commit:
    return Commit.from_record(tables.get("commits", commit))
