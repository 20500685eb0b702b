"""When a run is validated, on which rows, and whether the loss is a new best.

Owns that choice. Knows nothing of stores: it reads through whatever reader it is given. Invariant:
validation data is only ever what was given as such, and is read in the same order every time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.best import Best, best_after
from trainer.data.batches import validation_batches
from trainer.data.rows import TokenRows
from trainer.engine import Engine
from trainer.recipe import Settings
from trainer.residency import ShardReader

Ids = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The validation of one run."""

    rows: TokenRows
    batch_rows: int
    settings: Settings

    def is_due(self, step: int) -> bool:
        """Say whether a step is validated: every so many, and the last one."""
        every = self.settings.validate_every
        return every > 0 and (step % every == 0 or step == self.settings.max_steps)

    def measure(
        self, engine: Engine, reader: ShardReader, step: int, best: Best | None
    ) -> tuple[dict[str, Any], Best | None]:
        """Give the metrics of a step's held-out loss, and the best loss after it."""
        started = time.perf_counter()
        result = engine.evaluate(reader, self.batches())
        best = best_after(best, loss=result.loss, step=step, measure=self.measured_on)
        return {
            "validation_loss": result.loss,
            "validation_tokens": result.tokens,
            "validation_batches": result.batches,
            "validation_seconds": time.perf_counter() - started,
            "best_validation_loss": None if best is None else best.loss,
        }, best

    def batches(self) -> Iterator[Ids]:
        """Yield the rows in file order; the last batch may have fewer, unless left out."""
        limit = self.settings.max_validation_batches
        for batch in validation_batches(self.rows, self.batch_rows, limit):
            if len(batch) == self.batch_rows or not self.settings.validation_whole_batches:
                yield batch

    @property
    def measured_on(self) -> str:
        """Name the rows: two losses are comparable where these names are equal."""
        count = min(self.rows.row_count, self.settings.max_validation_batches * self.batch_rows)
        if self.settings.validation_whole_batches:
            count -= count % self.batch_rows
        return f"{self.rows.digest()}:{count}"


def validation_of(rows: TokenRows | None, batch_rows: int, settings: Settings) -> Validation | None:
    """Give the validation of a run; None where it has no rows for one."""
    if rows is None:
        return None
    return Validation(rows=rows, batch_rows=batch_rows, settings=settings)
