"""What exists of a run before it goes on: its durable head, and an active store that is ahead.

Owns the look at both stores, and what refuses them. Writes nothing. Invariants: a run never starts
empty where history exists, and no committed step is passed over without a word.
"""

from __future__ import annotations

import difflib
import os
import shlex
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import shardb
from shardb import Commit, Store
from shardb.branching import policy_of
from shardb.errors import ConflictError, NotFoundError, ObjectCorruptError, ObjectMissingError
from shardb.filesystem import RealFileSystem
from shardb.layout import check_name
from shardb.refs import STEP_PATTERN
from shardb.retention import Policy
from shardb.state import DEFAULT_BRANCH
from shardb.storage_errors import storage_errors
from shardb.transfer_lineage import lineage
from trainer.active_hint import hinted_active
from trainer.active_relation import Relation, open_active, relation_of
from trainer.adoption import ImportedModel, read_imported
from trainer.errors import InputError
from trainer.model.stored import RECIPE_SHARD, SOURCE_SHARD
from trainer.recipe_build import Given, settings_given
from trainer.run_shards import StoredRun, read_stored_run
from trainer.step_log import last_logged_step, log_folder

FORMAT_FILE = "FORMAT"
META = "meta/"


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a command line finds: `newest` is `durable`, or the head of the active store `ahead`.

    `imported` is what the durable store holds where that is a model that was never trained.
    `begins_branch` says that the branch does not exist and begins at `base`; `kept_commits`, how
    many the durable store keeps of a branch.
    """

    branch: str
    durable: StoredRun | None = None
    newest: StoredRun | None = None
    imported: ImportedModel | None = None
    ahead: Path | None = None
    begins_branch: bool = False
    kept_commits: int = Policy().keep_last

    @property
    def base(self) -> Commit | None:
        """Give the commit of the durable store that the run goes on from."""
        if self.imported is not None:
            return self.imported.commit
        return None if self.durable is None else self.durable.commit


def find_run(given: Given) -> Found:
    """Look into the stores that the flags, the last commit and the last start name."""
    path, branch = Path(given["store"]), given.get("branch", DEFAULT_BRANCH)
    check_name(branch, "branch")
    if STEP_PATTERN.match(branch):
        raise InputError(f"--branch {branch}: names of the form step-N mean steps; choose another")
    active = settings_given(given).get("active")
    if active is not None:
        _check_may_hold_steps(Path(active))
    if not _is_store(path):
        _check_may_begin(path, branch, from_ref=given.get("from_ref"))
        if "data_dir" not in given:
            raise _no_store(path)
        if active is not None:
            _refuse_history(Path(active), path)
        return Found(branch=branch)
    allow_network = bool(given.get("allow_network"))
    with shardb.open(path, allow_network=allow_network) as store:
        found = _in_durable(store, branch, given.get("from_ref"))
        found = replace(found, kept_commits=policy_of(store).keep_last)
        if found.base is None or found.begins_branch:
            return found
        return _with_active(store, path, found, found.base, given)


def _with_active(store: Store, path: Path, found: Found, base: Commit, given: Given) -> Found:
    """Look for newer steps in every active store that this run may have been trained in."""
    branch, durable = found.branch, found.durable
    named = (
        settings_given(given).get("active"),
        durable.settings.active if durable else None,
        hinted_active(path, branch),
    )
    for active_path in dict.fromkeys(Path(name) for name in named if name):
        if not _is_store(active_path):
            continue
        with open_active(active_path, base.step) as active:
            if relation_of(active, store, branch) is not Relation.AHEAD:
                continue
            _check_meta(active, active.branches()[branch])
            newest = read_stored_run(active, branch)
        assert newest is not None, "a store that is ahead has a head"
        if found.ahead is not None and found.newest != newest:
            raise ConflictError(
                f"{found.ahead} and {active_path} both go on from step {base.step} of {path},"
                " each on its own: remove the one that is not wanted"
            )
        found = replace(found, newest=newest, ahead=active_path)
    return found


def _in_durable(store: Store, branch: str, from_ref: str | None) -> Found:
    """Read the head of the branch, or of where it is to begin; nothing where there is no commit."""
    head = store.branches().get(branch)
    if from_ref is not None:
        start = _resolve_start(store, branch, head, from_ref)
        if head is None:
            return _at(store, branch, start, begins_branch=True)
        _check_began_at(store, branch, head, start)
    if head is None:
        _refuse_lost_head(store, branch)
        return Found(branch=branch)
    return _at(store, branch, head, begins_branch=False)


def _at(store: Store, branch: str, commit: Commit, *, begins_branch: bool) -> Found:
    """Read what a commit holds: a run, or a model that was imported and never trained."""
    _check_meta(store, commit)
    imported = read_imported(store, commit)
    if imported is not None:
        return Found(branch=branch, imported=imported, begins_branch=begins_branch)
    stored = read_stored_run(store, commit=commit)
    return Found(branch=branch, durable=stored, newest=stored, begins_branch=begins_branch)


def _check_meta(store: Store, commit: Commit) -> None:
    """Refuse damage that steps do not meet: who exports weeks later could not use what was trained.

    Reading a shard checks its digest; these are small.
    """
    with store.at(commit=commit.id) as view:
        for name in (name for name in view.names() if name.startswith(META)):
            try:
                view.read(name)
            except (ObjectCorruptError, ObjectMissingError) as error:
                raise type(error)(
                    f"{error.path}: this object, the shard {name} of step {commit.step}, is damaged"
                    f" or missing. `shardb repair {shlex.quote(store.root)} --from COPY` puts it"
                    f" back; {_who_else_has(commit, name)}",
                    path=error.path,
                ) from error


def _who_else_has(commit: Commit, name: str) -> str:
    """Say what can be made again to take a shard from."""
    anew = f"a run begun anew with the same flags has the same {name}"
    if SOURCE_SHARD not in commit.shards:
        return anew
    if name == RECIPE_SHARD:
        return f"{anew}; the import that it began with has none"
    return f"{anew}, and so has the same import"


def _resolve_start(store: Store, branch: str, head: Commit | None, from_ref: str) -> Commit:
    try:
        return store.resolve(from_ref)
    except NotFoundError as error:
        if head is None:
            raise
        raise NotFoundError(
            f"{error.message}; branch {branch!r} exists and is at step {head.step}: leave --from"
            " out to go on with it"
        ) from error


def _check_began_at(store: Store, branch: str, head: Commit, start: Commit) -> None:
    """Let the call that began a branch go on with it; refuse one that means another beginning."""
    if head.id == start.id:
        return
    found = lineage(store, head.id, [start.id])
    first = found.steps[0] if found.steps else head
    # Behind a step before the beginning comes one of the branch that it was taken from.
    began_here = first.parent == start.id and first.branch == branch
    if start.branch == branch or not found.reached or not began_here:
        raise ConflictError(
            f"{store.root}: branch {branch!r} exists, is at step {head.step}, and did not begin at"
            f" step {start.step} (commit {start.id}): leave --from out to go on with it, or give"
            " another --branch"
        )


def _refuse_lost_head(store: Store, branch: str) -> None:
    """Never start empty where history exists."""
    path = store.root
    branches = store.branches()
    if branches:
        raise NotFoundError(
            f"{path}: there is no branch {branch!r}; there are {', '.join(branches)}: begin it with"
            f" --branch {branch} --from STEP, or go on with one of them"
        )
    logged_step = last_logged_step(log_folder(Path(path), branch))
    if store.commits() or logged_step:
        raise ConflictError(
            f"{path}: branch {branch} has no commit, but the store has history (step {logged_step}"
            f" in its step log): see `shardb log {path}` and `shardb recover {path}`, or give"
            " another --store"
        )


def _check_may_begin(path: Path, branch: str, from_ref: str | None) -> None:
    """Refuse a place where no run may begin."""
    _refuse_lost_link(path, "--store")
    logged_step = last_logged_step(log_folder(path, branch))
    if logged_step > 0:
        raise InputError(
            f"{path}: its step log goes to step {logged_step}, but the store is gone: put the store"
            " back, or remove the folder to begin anew, or give another --store"
        )
    if path.exists() and (not path.is_dir() or not _may_become_store(path)):
        raise InputError(f"{path}: exists and holds no store: give another --store")
    if from_ref is not None:
        raise NotFoundError(f"{path}: there is no store, and so no {from_ref!r} to begin from")


def _check_may_hold_steps(active_path: Path) -> None:
    """Refuse a place where no active store can be made, before the durable one is."""
    if _is_store(active_path):
        return
    _refuse_lost_link(active_path, "--active")
    if active_path.exists() and (not active_path.is_dir() or not _may_become_store(active_path)):
        raise InputError(
            f"--active {active_path}: exists and holds no store: give an empty or a new folder"
        )


def _refuse_lost_link(path: Path, flag: str) -> None:
    """Make nothing beside what is not mounted."""
    if path.is_symlink() and not path.exists():
        raise InputError(
            f"{flag} {path}: this is a link that leads nowhere: mount or bring back what it leads"
            f" to, or give another {flag}"
        )


def _no_store(path: Path) -> InputError:
    """Say that a call which can only go on with a run names none: its name may be mistyped."""
    stores: list[str] = []
    with suppress(OSError):
        beside = path.absolute().parent.iterdir()
        stores = [each.name for each in beside if (each / FORMAT_FILE).is_file()]
    near = difflib.get_close_matches(path.name, stores, n=1)
    meant = f" (did you mean {path.with_name(near[0])}?)" if near else ""
    return InputError(
        f"--store {path}: there is no store here to go on with{meant}, and a new run needs"
        " --data-dir: the folder of token rows that `train-data prepare` made"
    )


def _refuse_history(active_path: Path, path: Path) -> None:
    """Refuse the active store of a run whose durable one is not there."""
    if not _is_store(active_path):
        return
    with shardb.open(active_path) as active:
        steps = [commit.step for commit in active.commits()]
    if steps:
        raise ConflictError(
            f"{active_path}: holds a run at step {max(steps)}, but {path} does not exist: put that"
            " store back, copy the run there with `shardb push`, or give another --active"
        )


def _is_store(path: Path) -> bool:
    # Objects are written only after FORMAT was: without it they mean damage, which opening tells.
    with storage_errors(RealFileSystem(), str(path), "looking for the store"):
        return (path / FORMAT_FILE).exists() or _has_entries(path / "objects")


def _may_become_store(path: Path) -> bool:
    """Whether a folder is empty, or holds only what a store's making left when it died."""
    return not _has_entries(path) or (path / "wal").is_dir()


def _has_entries(folder: Path) -> bool:
    return folder.is_dir() and any(True for _ in os.scandir(folder))
