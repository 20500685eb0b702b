"""Which snapshots a commit gets, and which one a new best takes the place of.

Owns the names: `step-N` at every `--snapshot-every`, `best-step-N` at the lowest validation loss
with `--snapshot-best`; on another branch than main the branch's name comes first. A snapshot never
moves, so a new best gets a name of its own and the one it beats is dropped: with worse or equal
loss, of the same branch and measured on the same rows, never another. Knows nothing of when commits
are published.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from shardb import Commit, Store, branching
from shardb.errors import NotFoundError, SnapshotExistsError
from shardb.state import DEFAULT_BRANCH
from trainer.best import Best
from trainer.recipe import Settings


def pins_of(commit: Commit, settings: Settings, branch: str) -> list[str]:
    """Name the snapshots that a commit is pinned under."""
    if commit.branch != branch:
        return []  # where the branch began: another branch's to pin
    prefix = _prefix(branch)
    names = []
    every = settings.snapshot_every
    if every and commit.step and commit.step % every == 0:
        names.append(f"{prefix}step-{commit.step}")
    best = Best.from_json(commit.state.get("best"))
    if settings.snapshot_best and best is not None and best.step == commit.step:
        names.append(f"{prefix}best-step-{commit.step}")
    return names


def pin(store: Store, commit: Commit, name: str, branch: str) -> str | None:
    """Pin a commit and drop the best that it beats; give a warning where the name is taken."""
    try:
        store.create_snapshot(name, ref=commit.id)
    except SnapshotExistsError:
        # The run was rewound past this step and trained again: the older snapshot stays.
        return f"warning: a snapshot {name} of another commit exists and was left as it is"
    for beaten in beaten_bests(store.snapshots(), name, branch):
        drop(store, beaten)
    return None


def drop(store: Store, name: str) -> None:
    """Remove a snapshot's name, if it is still there."""
    try:
        branching.delete_snapshot(store, name)
    except NotFoundError:
        return


def beaten_bests(snapshots: Mapping[str, Commit], name: str, branch: str) -> list[str]:
    """Name the bests of a branch that the one called `name` beats on the same rows."""
    pattern = re.compile(re.escape(_prefix(branch)) + r"best-step-\d+")
    pinned = snapshots.get(name)  # not there yet where the index cannot be written: it is behind
    new = None if pinned is None else _own_best(pinned)
    if new is None or not pattern.fullmatch(name):
        return []
    return [
        other
        for other, commit in snapshots.items()
        if other != name
        and pattern.fullmatch(other)
        and (old := _own_best(commit)) is not None
        and old.measure == new.measure
        and old.loss >= new.loss
    ]


def _own_best(commit: Commit) -> Best | None:
    """Give the best of a commit that is the best itself."""
    best = Best.from_json(commit.state.get("best"))
    return best if best is not None and best.step == commit.step else None


def _prefix(branch: str) -> str:
    return "" if branch == DEFAULT_BRANCH else f"{branch}-"
