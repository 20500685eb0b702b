"""Where a run commits, and where its commits become durable: one store, or two.

Owns the interface that the loop of a run uses, and the plain case of one store. `trainer.active`
has the case of two. Knows nothing of training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from shardb import Commit, Store
from trainer.pins import pin


class Tiers(Protocol):
    """The store in which steps are made, and what keeps them."""

    branch: str
    training: Store
    durable: Store

    @property
    def durable_step(self) -> int:
        """The newest step that survives power loss; 0 where none does: step 0 can be made again."""
        ...

    @property
    def publish_pending(self) -> int:
        """Commits that are being published."""
        ...

    def ready(self, head: Commit) -> float:
        """Wait until the step after `head` may be staged; give the seconds waited."""
        ...

    def keep(self, commit: Commit, names: Sequence[str]) -> float:
        """Pin a commit under names, and publish it if it is due; give the seconds waited."""
        ...

    def finish(self, head: Commit) -> None:
        """Make the newest commit as durable as it gets."""
        ...


class OneTier:
    """One store: a commit is durable when it returns, unless the store is on a RAM disk."""

    def __init__(self, store: Store, branch: str, note: Callable[[str], None]) -> None:
        self.training = self.durable = store
        self.branch = branch
        self._note = note

    @property
    def durable_step(self) -> int:
        return durable_step_of(self.training, self.branch)

    @property
    def publish_pending(self) -> int:
        return 0

    def ready(self, head: Commit) -> float:
        return 0.0

    def keep(self, commit: Commit, names: Sequence[str]) -> float:
        for name in names:
            warning = pin(self.training, commit, name, self.branch)
            if warning is not None:
                self._note(warning)
        return 0.0

    def finish(self, head: Commit) -> None:
        """The commit is what it is."""


def durable_step_of(store: Store, branch: str) -> int:
    """Give the newest step of a branch that survives power loss; none does on a RAM disk."""
    return 0 if store.mapped else store.durable_step(branch) or 0
