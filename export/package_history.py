"""What the log says of a commit's training, for a model card.

Owns the walk from the log to a few measured facts. Knows nothing of cards. Nothing here is taken
from a place that the log does not vouch for: neither the step log beside the store nor a clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from export.package_weights import Weights
from shardb import ReadView
from shardb.filesystem import RealFileSystem
from shardb.timeline import Row, read_timeline
from trainer.model.stored import RECIPE_SHARD, read_bytes

RECIPE_FACTS = (
    *("seq_len", "micro_batch_size", "gradient_accumulation_steps", "optimizer", "learning_rate"),
    *("lr_schedule", "weight_decay", "dtype", "seed", "data_digest"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Facts of one line of training; None and empty where the log has none.

    validation: held-out loss and the step that it was measured after.
    """

    tokens_seen: int | None
    first_loss: tuple[int, float] | None
    last_loss: tuple[int, float] | None
    validation: tuple[int, float] | None
    recipe: Mapping[str, Any]


def measured(weights: Weights) -> Measured:
    """Read the line of commits that ends in the one that is exported."""
    losses: list[tuple[int, float]] = []
    validation = None
    for row in _line(weights.store.root, weights.commit.id):
        if isinstance(loss := row.metrics.get("loss"), float):
            losses.append((row.step, loss))
        if validation is None and isinstance(held_out := row.metrics.get("validation_loss"), float):
            validation = (row.step, held_out)
    tokens = weights.commit.state.get("tokens_seen")
    return Measured(
        tokens_seen=tokens if isinstance(tokens, int) else None,
        first_loss=losses[-1] if losses else None,
        last_loss=losses[0] if losses else None,
        validation=validation,
        recipe=_recipe(weights.view),
    )


def _line(root: str, commit: str) -> Iterator[Row]:
    """Give the commit's row and those that it comes from, newest first."""
    rows = {row.commit: row for row in read_timeline(RealFileSystem(), root).rows}
    at = rows.pop(commit, None)
    while at is not None:
        yield at
        at = rows.pop(at.before, None) if at.before is not None else None


def _recipe(view: ReadView) -> Mapping[str, Any]:
    if RECIPE_SHARD not in view.names():
        return {}
    values = json.loads(read_bytes(view, RECIPE_SHARD))
    return {name: values[name] for name in RECIPE_FACTS if name in values}
