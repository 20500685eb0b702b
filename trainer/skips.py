"""Batches that were consumed and changed nothing: their record, their limit, and the stop.

Owns what is remembered of them between two commits. Knows nothing of how a step is made. Nothing is
committed for a skip, so a run that is killed before its next commit meets the same batches again
with the same scale and decides the same. Invariant: a run never skips without an end: after
`limit` batches in a row it stops and says what is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from trainer.errors import (
    GradientOverflowError,
    NonFiniteError,
    SkipLimitError,
    UpdateRejectedError,
)

SkipReason = GradientOverflowError | UpdateRejectedError
Diagnosis = Callable[[], NonFiniteError | None]


class Skips:
    """The batches skipped since the last commit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._reasons: list[SkipReason] = []
        self._records: list[dict[str, Any]] = []

    def add(self, position: int, reason: SkipReason, diagnose: Diagnosis) -> None:
        """Note a batch that begins at row `position`; SkipLimitError when it is one too many."""
        self._reasons.append(reason)
        record = {"position": position, "reason": reason.kind, "why": reason.message}
        if isinstance(reason, UpdateRejectedError):
            record["guarded_step_replay"] = dict(reason.details)
        self._records.append(record)
        if len(self._reasons) >= self._limit:
            raise SkipLimitError(self._report(diagnose))

    def metrics(self, step: int, skipped_steps: int) -> dict[str, Any]:
        """Give what a commit says of the skips before it; `skipped_steps` are those of the run."""
        found: dict[str, Any] = {
            "skipped_steps": skipped_steps,
            "skip_rate": skipped_steps / (step + skipped_steps),
        }
        return found | ({"skipped": list(self._records)} if self._records else {})

    def clear(self) -> None:
        """Forget what a commit has recorded."""
        self._reasons.clear()
        self._records.clear()

    def _report(self, diagnose: Diagnosis) -> str:
        kinds = Counter(reason.kind for reason in self._reasons)
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        said = (
            f"{len(self._reasons)} batches in a row were skipped ({counts}), the limit of"
            f" --max-skipped-steps; nothing of them was committed. The last: "
            f"{self._reasons[-1].message}"
        )
        if isinstance(self._reasons[-1], GradientOverflowError):
            return f"{said}. {verdict(diagnose())}"
        return (
            f"{said}. Resume with a lower --learning-rate, a larger --guard-replay-loss-tolerance,"
            " or --guard-replay-on-exhaust accept"
        )


def verdict(error: NonFiniteError | None) -> str:
    """Say what gradients in fp32 tell of those that were not finite in fp16."""
    if error is None:
        return (
            "In fp32 the same batch has finite gradients: the range of fp16 is too small for it;"
            " resume with --dtype bf16"
        )
    return f"In fp32, without a loss scale, too: {error.message}"


def explained(error: NonFiniteError, dtype: str, diagnose: Diagnosis) -> NonFiniteError:
    """Add what fp32 tells to an error of fp16; give any other error as it is."""
    if dtype != "fp16" or isinstance(error, GradientOverflowError):
        return error
    message = f"{error.message}. {verdict(diagnose())}"
    return NonFiniteError(message, shard=error.shard, tensor=error.tensor)
