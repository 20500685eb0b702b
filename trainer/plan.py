"""What a run will be: its recipe, settings, data and budgets, checked before anything is made.

Owns the two beginnings, of a new run and of one that a store holds, and what refuses them. Knows
nothing of engines or screens, and writes nothing. Invariant: a run never starts empty where history
exists.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import shardb
from shardb import Store
from shardb.errors import ConflictError
from trainer.budget import Budget, budget_of
from trainer.device import Device
from trainer.errors import InputError
from trainer.inputs import Inputs, end_of_text_id, open_inputs
from trainer.recipe import Recipe, Settings
from trainer.recipe_build import (
    Changes,
    DataFacts,
    Given,
    changes,
    new_model,
    new_run,
    resumed_run,
)
from trainer.run_shards import BRANCH, StoredRun, read_stored_run
from trainer.step_log import last_logged_step

LOG_FOLDER = "logs"
FORMAT_FILE = "FORMAT"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run that is checked and may begin; `stored` is None when it begins at step 0."""

    store: Path
    recipe: Recipe
    settings: Settings
    inputs: Inputs
    budget: Budget
    stored: StoredRun | None
    notes: tuple[str, ...]

    @property
    def recipe_changes(self) -> Changes:
        """What differs from the stored recipe."""
        return changes(self.stored.recipe, self.recipe) if self.stored else {}


def look(path: Path, allow_network: bool) -> StoredRun | None:
    """Read what the store holds; None when a run may begin there."""
    # Objects are written only after FORMAT was: without it they mean damage, which opening tells.
    if (path / FORMAT_FILE).exists() or _has_entries(path / "objects"):
        with shardb.open(path, allow_network=allow_network) as store:
            stored = read_stored_run(store)
            if stored is None:
                _refuse_lost_head(path, store)
        return stored
    logged_step = last_logged_step(path / LOG_FOLDER)
    if logged_step > 0:
        raise InputError(
            f"{path}: its step log goes to step {logged_step}, but the store is gone: put the store"
            " back, or remove the folder to begin anew"
        )
    if path.exists() and (not path.is_dir() or not _may_become_store(path)):
        raise InputError(f"{path}: exists and holds no store: give another --store")
    return None


def _refuse_lost_head(path: Path, store: Store) -> None:
    """Never start empty where history exists."""
    logged_step = last_logged_step(path / LOG_FOLDER)
    if store.branches() or store.commits() or logged_step:
        raise ConflictError(
            f"{path}: branch {BRANCH} has no commit, but the store has history"
            f" (step {logged_step} in its step log): see `shardb log {path}` and `shardb recover"
            f" {path}`, or give another --store"
        )


def _may_become_store(path: Path) -> bool:
    """Whether a folder is empty, or holds only what a store's making left when it died."""
    return not _has_entries(path) or (path / "wal").is_dir()


def _has_entries(folder: Path) -> bool:
    return folder.is_dir() and any(True for _ in os.scandir(folder))


def finished_text(stored: StoredRun, given: Given) -> str | None:
    """Say so, before any data is opened, when a run has all its steps."""
    _, settings = resumed_run(stored.recipe, stored.settings, given, device=None)
    if settings.max_steps is None or stored.step < settings.max_steps:
        return None
    loss = stored.commit.metrics.get("loss")
    return (
        f"the run has {stored.step} steps already (--max-steps {settings.max_steps}"
        + (f", loss {loss:.4f}" if loss is not None else "")
        + "): nothing to do; raise --max-steps to go on"
    )


def plan_new(path: Path, given: Given, notes: list[str]) -> Plan:
    """Plan a run that begins; InputError names the flag or file that is wrong."""
    data_dir = _need_data_dir(given.get("data_dir"))
    model = new_model(given, end_of_text_id(data_dir))
    device = Device.from_name(given.get("device", "auto")).name
    inputs = open_inputs(
        data_dir,
        given.get("val_data_dir"),
        vocab_size=model.vocab_size,
        seq_len=given.get("seq_len"),
    )
    facts = DataFacts(
        seq_len=inputs.rows.seq_len,
        digest=inputs.data_digest,
        end_of_text_id=end_of_text_id(data_dir),
    )
    threads = given.get("threads") or torch.get_num_threads()
    recipe, settings = new_run(given, facts, device=device, threads=threads)
    return Plan(
        store=path,
        recipe=recipe,
        settings=settings,
        inputs=inputs,
        budget=budget_of(recipe, settings),
        stored=None,
        notes=(*notes, *inputs.notes),
    )


def plan_resumed(path: Path, stored: StoredRun, given: Given, notes: list[str]) -> Plan:
    """Plan how a stored run goes on; InputError also names what may not change."""
    device = Device.from_name(given["device"]).name if "device" in given else None
    recipe, settings = resumed_run(stored.recipe, stored.settings, given, device=device)
    inputs = open_inputs(
        settings.data_dir,
        settings.val_data_dir,
        vocab_size=recipe.model.vocab_size,
        seq_len=recipe.seq_len,
    )
    if inputs.data_digest != recipe.data_digest:
        if not given.get("accept_changed_data"):
            raise InputError(
                f"{settings.data_dir}: this is not the data that the run began on (digest"
                f" {inputs.data_digest}, then {recipe.data_digest}): give the same data, or"
                " --accept-changed-data to go on with this one"
            )
        recipe = replace(recipe, data_digest=inputs.data_digest)
    said = [
        f"changed: {name} from {old} to {new}"
        for one, other in ((stored.recipe, recipe), (stored.settings, settings))
        for name, (old, new) in changes(one, other).items()
    ]
    return Plan(
        store=path,
        recipe=recipe,
        settings=settings,
        inputs=inputs,
        budget=budget_of(recipe, settings),
        stored=stored,
        notes=(*notes, *inputs.notes, *said),
    )


def _need_data_dir(data_dir: str | None) -> str:
    if data_dir is None:
        raise InputError(
            "a new run needs --data-dir: the folder of token rows that `train-data prepare` made"
        )
    return data_dir
