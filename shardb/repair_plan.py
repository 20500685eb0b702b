"""The nouns of a repair: what would be done, what is lost by it, and what cannot be mended.

Knows nothing of how anything is decided or done.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shardb.findings import Finding


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One thing that a repair does.

    `what` is a stable word (the set only grows), `does` a sentence, and `loses` what is given up
    for good by it; None where nothing is.
    """

    what: str
    path: str
    does: str
    loses: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {"what": self.what, "path": self.path, "does": self.does, "loses": self.loses}


@dataclass(frozen=True, kw_only=True, slots=True)
class Unmended:
    """Damage that stays, and why."""

    path: str
    why: str

    def to_json(self) -> dict[str, Any]:
        return {"path": self.path, "why": self.why}


@dataclass(kw_only=True)
class Plan:
    """Everything that a repair would do, in order, and what would be left."""

    actions: list[Action] = field(default_factory=list)
    unmended: list[Unmended] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is wrong."""
        return not self.actions and not self.unmended

    @property
    def loses(self) -> bool:
        """Whether something is given up for good."""
        return self.losses > 0

    @property
    def losses(self) -> int:
        """How many actions give something up for good."""
        return sum(action.loses is not None for action in self.actions)

    def add(self, what: str, path: str, does: str, loses: str | None = None) -> None:
        """Add an action."""
        self.actions.append(Action(what=what, path=path, does=does, loses=loses))

    def leave(self, path: str, why: str) -> None:
        """Add what cannot be mended."""
        self.unmended.append(Unmended(path=path, why=why))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A plan, whether it was carried out, and the errors that a check still finds after it."""

    plan: Plan
    done: bool
    remaining: tuple[Finding, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 when nothing was or is wrong, or all was mended without a loss; else 1."""
        if not self.done:
            return 0 if self.plan.is_empty else 1
        return 1 if self.plan.loses or self.plan.unmended or self.remaining else 0

    def to_json(self) -> dict[str, Any]:
        return {
            "actions": [action.to_json() for action in self.plan.actions],
            "unmended": [item.to_json() for item in self.plan.unmended],
            "done": self.done,
            "loses": self.plan.loses,
            "remaining": [finding.to_json() for finding in self.remaining],
        }
