"""What an exploration tried and what it found wrong.

Owns the counts and the form of a violation, for people and as JSON. Knows nothing of exploring.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    """A disk that recovery did not bring back to an allowed state, and how to build it again."""

    seed: int
    point: int
    operation: str
    image: str
    index: str
    recovery: str
    reason: str

    def __str__(self) -> str:
        where = f"stopped before [{self.operation}] (point {self.point}, seed {self.seed})"
        again = f", recovery stopped at {self.recovery}" if self.recovery else ""
        return f"{where}, image [{self.image}], index {self.index}{again}: {self.reason}"


@dataclass(kw_only=True)
class Counts:
    """What was explored. `states` are distinct pairs of disk and index; all were opened.

    `faults` and `indexes` count them by what the disk and the index had suffered; states of crashed
    recoveries are among them, also those that follow on a process killed alone.
    """

    operations: int = 0
    images: int = 0
    states: int = 0
    recoveries_crashed: int = 0
    processes_killed: int = 0
    recovery_states: int = 0
    further_commits: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    indexes: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.operations} operations, {self.images} images, {self.states} distinct states "
            f"opened and checked, {self.further_commits} of them committed to again; "
            f"{self.recoveries_crashed} recoveries crashed ({self.processes_killed} of them of a "
            f"process killed alone) in {self.recovery_states} further distinct states; "
            f"{len(self.violations)} violations"
        )

    def to_json(self) -> dict[str, Any]:
        """The counts as JSON has them; violations as text."""
        return {
            "operations": self.operations,
            "images": self.images,
            "states": self.states,
            "further_commits": self.further_commits,
            "recoveries_crashed": self.recoveries_crashed,
            "processes_killed": self.processes_killed,
            "recovery_states": self.recovery_states,
            "faults": dict(sorted(self.faults.items())),
            "indexes": dict(sorted(self.indexes.items())),
            "violations": [str(violation) for violation in self.violations],
        }
