"""A run as its store holds it: the shards under meta/ and the state of its newest commit.

Owns their names and encoding. Knows nothing of training or of flags. Invariant: meta shards hold
nothing that depends on time or place, so equal recipes give equal objects.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardb import Commit, ReadView, Store, Transaction
from shardb.errors import NotFoundError
from trainer.errors import InputError
from trainer.recipe import Recipe, Settings, canonical_json

BRANCH = "main"
RECIPE_SHARD = "meta/recipe"
MODEL_SHARD = "meta/model"
TOKENIZER_SHARD = "meta/tokenizer"
TENSOR = "json"
STEP_NAME = re.compile(r"step-\d+")


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
    """Where a run is in its data: rows consumed and tokens trained on."""

    position: int = 0
    tokens_seen: int = 0

    @classmethod
    def of(cls, commit: Commit) -> Cursor:
        """Read the cursor of a commit's state."""
        return cls(position=commit.state["position"], tokens_seen=commit.state["tokens_seen"])


def read_stored_run(store: Store) -> StoredRun | None:
    """Read the head of the run's branch; None in a store without commits."""
    try:
        view = store.at(branch=BRANCH)
    except NotFoundError:
        return None
    with view:
        return _stored_run(view)


def write_meta(txn: Transaction, recipe: Recipe, tokenizer: bytes | None) -> None:
    """Stage the meta shards; the tokenizer is kept as it is when none is given."""
    _write_bytes(txn, RECIPE_SHARD, recipe.to_bytes())
    _write_bytes(txn, MODEL_SHARD, canonical_json(recipe.model.to_json()))
    if tokenizer is not None:
        _write_bytes(txn, TOKENIZER_SHARD, tokenizer)


def read_bytes(view: ReadView, shard: str) -> bytes:
    """Read a meta shard's content."""
    return view.read(shard).array(TENSOR).tobytes()


def state_of(cursor: Cursor, recipe: Recipe, settings: Settings) -> dict[str, Any]:
    """Give the small state of a commit."""
    return {
        "position": cursor.position,
        "tokens_seen": cursor.tokens_seen,
        "seed": recipe.seed,
        "scaler": None,
        "settings": settings.to_json(),
    }


def lines_since(store: Store, head: Commit, last_step: int) -> Iterator[dict[str, Any]]:
    """Make the step-log lines after `last_step` up to `head` again, from the store's log."""
    if head.step <= last_step:
        return
    chain = [head]
    if head.step > last_step + 1:
        # Only a power cut loses more than one line: the whole log is read for that alone.
        commits = {r["id"]: r for r in store.history() if r["kind"] == "commit"}
        while (record := commits.get(chain[-1].parent or "")) and record["step"] > last_step:
            chain.append(Commit.from_record(record))
    for commit in reversed(chain):
        yield line_of(commit, durable_step=commit.step) | {"rebuilt": True}


def line_of(commit: Commit, *, durable_step: int) -> dict[str, Any]:
    """Give the step-log line of a commit: its metrics, and the newest step that is durable."""
    return {"step": commit.step, **commit.metrics, "durable_step": durable_step}


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


def _write_bytes(txn: Transaction, shard: str, data: bytes) -> None:
    array = np.frombuffer(data, dtype=np.uint8)
    txn.write(shard, {TENSOR: array}, trainable=False)
