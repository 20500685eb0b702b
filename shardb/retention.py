"""Retention: which commits of a branch stay without a snapshot.

Owns the policy and the choice. A policy is data in the log, so every process and every replay makes
the same choice. The head of a branch is always kept; nothing here deletes, it only says what the
branch no longer pins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardb.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Keep the last `keep_last` commits, every `keep_every`-th step, the `keep_best` by a metric.

    `keep_every` and `keep_best` are off at 0. `best_metric` is looked up in the commits' metrics;
    commits without it are not candidates.
    """

    keep_last: int = 2
    keep_every: int = 0
    keep_best: int = 0
    best_metric: str = "validation_loss"
    best_mode: str = "min"

    def __post_init__(self) -> None:
        """UsageError when a number makes no sense: nothing may be deleted by a slip."""
        if not _is_count(self.keep_last) or self.keep_last < 1:
            raise UsageError(f"keep_last is {self.keep_last!r}; it must be a whole number >= 1")
        for name in ("keep_every", "keep_best"):
            value = getattr(self, name)
            if not _is_count(value) or value < 0:
                raise UsageError(f"{name} is {value!r}; it must be a whole number >= 0 (0: off)")
        if self.best_mode not in ("min", "max"):
            raise UsageError(f"best_mode is {self.best_mode!r}; it must be 'min' or 'max'")
        if not self.best_metric:
            raise UsageError("best_metric is empty; name a metric of the commits")

    def to_record(self) -> dict[str, Any]:
        return {
            "keep_last": self.keep_last,
            "keep_every": self.keep_every,
            "keep_best": self.keep_best,
            "best_metric": self.best_metric,
            "best_mode": self.best_mode,
        }

    @staticmethod
    def from_record(record: Mapping[str, Any] | None) -> Policy:
        """The policy as stored; the default where none was."""
        return Policy(**record) if record else Policy()


def kept(
    policy: Policy, retained: Sequence[str], commit_of: Callable[[str], Mapping[str, Any]]
) -> list[str]:
    """Which of a branch's retained commits (oldest first, head last) the policy keeps, in order."""
    keep = set(retained[-policy.keep_last :])
    older = retained[: -policy.keep_last]
    if policy.keep_every and older:
        keep |= {c for c in older if commit_of(c)["step"] % policy.keep_every == 0}
    if policy.keep_best:
        keep |= set(_best(policy, retained, commit_of))
    return [commit for commit in retained if commit in keep]


def _best(
    policy: Policy, retained: Sequence[str], commit_of: Callable[[str], Mapping[str, Any]]
) -> list[str]:
    scored: list[tuple[float, int, str]] = []
    for commit in retained:
        record = commit_of(commit)
        value = record["metrics"].get(policy.best_metric)
        if isinstance(value, (int, float)) and math.isfinite(value):
            scored.append((value if policy.best_mode == "min" else -value, record["step"], commit))
    return [commit for _, _, commit in sorted(scored)[: policy.keep_best]]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
