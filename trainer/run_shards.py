"""A run as its store holds it: the shards under meta/ and the state of its newest commit.

Owns their names and encoding. Knows nothing of training or of flags. Invariant: meta shards hold
nothing that depends on time or place, so equal recipes give equal objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardb import Commit, ReadView, Store, Transaction
from shardb.errors import NotFoundError
from shardb.state import DEFAULT_BRANCH
from shardb.transfer_lineage import lineage
from trainer.best import Best
from trainer.errors import InputError
from trainer.model.stored import (
    RECIPE_SHARD,
    TOKENIZER_SHARD,
    read_bytes,
    write_bytes,
    write_model,
)
from trainer.recipe import Recipe, Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRun:
    """The newest commit of a run with its recipe and settings."""

    commit: Commit
    recipe: Recipe
    settings: Settings

    @property
    def step(self) -> int:
        """The last committed step."""
        return self.commit.step


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """Where a run is, as far as the next step depends on it.

    position: rows consumed; tokens_seen: tokens trained on; skipped_steps: steps that consumed rows
    and were not committed; scaler: the state of the loss scale; best: the lowest validation loss.
    """

    position: int = 0
    tokens_seen: int = 0
    skipped_steps: int = 0
    scaler: Mapping[str, Any] | None = None
    best: Best | None = None

    @classmethod
    def of(cls, commit: Commit) -> Cursor:
        """Read the cursor of a commit's state."""
        state = commit.state
        return cls(
            position=state["position"],
            tokens_seen=state["tokens_seen"],
            skipped_steps=state.get("skipped_steps", 0),
            scaler=state.get("scaler"),
            best=Best.from_json(state.get("best")),
        )

    def past(self, rows: int) -> Cursor:
        """Give the cursor after so many more rows, which were not trained on."""
        return replace(self, position=self.position + rows)


def read_stored_run(
    store: Store, branch: str = DEFAULT_BRANCH, commit: Commit | None = None
) -> StoredRun | None:
    """Read the head of a branch, or the commit given; None when there is no such branch."""
    try:
        view = store.at(branch=branch) if commit is None else store.at(commit=commit.id)
    except NotFoundError:
        return None
    with view:
        return _stored_run(view)


def write_meta(txn: Transaction, recipe: Recipe, tokenizer: bytes | None) -> None:
    """Stage the meta shards; the tokenizer is kept as it is when none is given."""
    write_bytes(txn, RECIPE_SHARD, recipe.to_bytes())
    write_model(txn, recipe.model)
    if tokenizer is not None:
        write_bytes(txn, TOKENIZER_SHARD, tokenizer)


def state_of(cursor: Cursor, recipe: Recipe, settings: Settings) -> dict[str, Any]:
    """Give the small state of a commit."""
    return {
        "position": cursor.position,
        "tokens_seen": cursor.tokens_seen,
        "skipped_steps": cursor.skipped_steps,
        "seed": recipe.seed,
        "scaler": None if cursor.scaler is None else dict(cursor.scaler),
        "best": None if cursor.best is None else cursor.best.to_json(),
        "settings": settings.to_json(),
    }


def lines_since(
    store: Store, head: Commit, last_step: int, *, durable_step: int
) -> Iterator[dict[str, Any]]:
    """Make the step-log lines after `last_step` up to `head` again, from the store's log."""
    if head.step <= last_step:
        return
    if head.step > last_step + 1:
        # Only a power cut loses more than one line: the whole log is read for that alone. Steps
        # that were never published one by one are told by the commit that rolled them up.
        for step in lineage(store, head.id, []).steps:
            if step.step > last_step and step.step > 0:
                yield _rebuilt(step.step, step.metrics, durable_step)
    yield _rebuilt(head.step, head.metrics, durable_step)


def line_of(commit: Commit, *, durable_step: int) -> dict[str, Any]:
    """Give the step-log line of a commit: its metrics, and the newest step that is durable."""
    return {"step": commit.step, **commit.metrics, "durable_step": durable_step}


def _rebuilt(step: int, metrics: Mapping[str, Any], durable_step: int) -> dict[str, Any]:
    """A line of a step that may have been durable long before; what is so now is certain."""
    return {"step": step, **metrics, "durable_step": min(step, durable_step), "rebuilt": True}


def read_recipe(view: ReadView) -> Recipe:
    """Read the recipe of a commit; InputError when it is no commit of a training run."""
    if RECIPE_SHARD not in view.names():
        raise InputError(
            f"step {view.commit.step} of branch {view.commit.branch} is not of a training run (no"
            f" shard {RECIPE_SHARD}): give another --store"
        )
    return Recipe.from_bytes(read_bytes(view, RECIPE_SHARD))


def _stored_run(view: ReadView) -> StoredRun:
    recipe = read_recipe(view)
    settings: Mapping[str, Any] = view.commit.state["settings"]
    return StoredRun(commit=view.commit, recipe=recipe, settings=Settings.from_json(settings))
