"""Two stores for one run: an active one, mostly on a RAM disk, and the durable one behind it.

Owns seeding, publishing and the rule for space: steps are made in the active store; a copy of some
of them goes to the durable store in the background, one at a time. Knows nothing of training.

Invariants:
- The active store never holds more than `copies` copies of the run. From three on one is left for
  the commit that is being published, so that steps go on beside it; with two, the step behind it
  waits until it is published.
- A snapshot is first pinned in the active store, as the intention; when its commit is published it
  gets its name in the durable store and loses the one in the active store. So one that a kill
  interrupts is made up for at the next start.
- An error of a publication ends the run at its next step. Nothing is lost by it: the active store
  has every step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from shardb import Commit, Store, branching
from shardb.errors import BranchLockedError, ConflictError, SnapshotExistsError
from shardb.retention import Policy
from shardb.transfer import copy_commit, copy_snapshot
from shardb.transfer_publisher import Publisher
from trainer.active_relation import Relation, relation_of
from trainer.pins import beaten_bests, drop
from trainer.sizes import in_bytes
from trainer.tiers import durable_step_of
from trainer.watchdog import Watchdog


@dataclass(frozen=True, kw_only=True, slots=True)
class Publishing:
    """When steps are published, and how many copies the active store may hold."""

    every: int
    copies: int

    @property
    def kept(self) -> int:
        """Commits that stay beside the step in work and, where there is room, a published one."""
        return max(1, self.copies - 2)

    @property
    def goes_on(self) -> bool:
        """Say whether steps are made while an older one is published."""
        return self.copies > self.kept + 1


class TwoTiers:
    """The stores of a run that trains in an active one; `close` it before the stores."""

    def __init__(
        self,
        active: Store,
        durable: Store,
        branch: str,
        *,
        publishing: Publishing,
        watchdog: Watchdog,
        note: Callable[[str], None],
    ) -> None:
        """Become the writer of the branch in both stores; BranchLockedError beside another one."""
        self.training = active
        self.durable = durable
        self.branch = branch
        self._publishing = publishing
        self._watchdog = watchdog
        self._note = note
        self._in_flight: Commit | None = None
        self._publisher = Publisher(active, durable, branch)
        try:
            with active.appender.errors(f"locking branch {branch!r}"):
                active.locks.take_branch(branch)
            _keep_last(active, publishing.kept)
        except BaseException:
            self._publisher.close()
            raise

    @property
    def durable_step(self) -> int:
        return durable_step_of(self.durable, self.branch)

    @property
    def publish_pending(self) -> int:
        return 0 if self._in_flight is None else 1

    def seed(self) -> None:
        """Bring the active store to the durable head, unless it is there or ahead."""
        relation = relation_of(self.training, self.durable, self.branch)
        if relation in (Relation.ABSENT, Relation.BEHIND):
            head = self.durable.branches()[self.branch]
            with self._watchdog.watching(lambda: f"{self.training.root} is filled"):
                copy_commit(self.durable, self.training, head.id, self.branch)
        self._name_durably()
        for other in self.training.branches().keys() - {self.branch}:
            self._leave_branch(other)

    def _leave_branch(self, branch: str) -> None:
        """Publish what a branch has that is not trained now, and give its space back."""
        try:
            if relation_of(self.training, self.durable, branch) is Relation.AHEAD:
                copy_commit(self.training, self.durable, branch, branch)
            branching.delete_branch(self.training, branch)
        except BranchLockedError:
            self._note(f"warning: branch {branch} is trained in {self.training.root} too")

    def ready(self, head: Commit) -> float:
        in_flight = self._in_flight
        if in_flight is None:
            return 0.0
        if self._publisher.busy and (self._publishing.goes_on or head.id == in_flight.id):
            return 0.0
        return self._settle(f"step {head.step + 1}")

    def keep(self, commit: Commit, names: Sequence[str]) -> float:
        for name in names:
            try:
                self.training.create_snapshot(name, ref=commit.id)
            except SnapshotExistsError as error:
                self._note(f"warning: {error.message}")
        every = self._publishing.every
        if names or (every and commit.step % every == 0):
            return self._publish(commit)
        return 0.0

    def finish(self, head: Commit) -> None:
        self._settle("the end")
        self._publish(head)
        self._settle("the end")

    def close(self) -> None:
        """Give the branch of the durable store up; waits for a publication in flight."""
        self._publisher.close()

    def _publish(self, commit: Commit) -> float:
        waited_seconds = self._settle(f"the publication of step {commit.step}")
        if self.durable.branches()[self.branch].id == commit.id:
            self._name_durably()
            return waited_seconds
        self._publisher.publish(commit)
        self._in_flight = commit
        return waited_seconds

    def _settle(self, who: str) -> float:
        """Wait for the publication in flight, then give its snapshots their durable names."""
        commit = self._in_flight
        if commit is None:
            return 0.0
        began = time.monotonic()
        with self._watchdog.watching(lambda: self._waiting_text(who, commit)):
            self._in_flight = None
            self._publisher.wait()
            self._name_durably()
            self._give_space_back()
        return time.monotonic() - began

    def _give_space_back(self) -> None:
        """Let the next step have the files of the commit that only its publication still needed."""
        with self.training.appender.exclusive("giving space back"):
            self.training.appender.sweep()

    def _waiting_text(self, who: str, commit: Commit) -> str:
        counts = self._publisher.counts
        return (
            f"{who} waits for step {commit.step} to be published to {self.durable.root}:"
            f" {in_bytes(counts.bytes_done)} of {in_bytes(counts.bytes_total)} are copied"
        )

    def _name_durably(self) -> None:
        """Move every snapshot of the active store to the durable one."""
        pinned = self.training.snapshots()
        for name in sorted(pinned, key=lambda name: pinned[name].step):
            self._publish_pinned(pinned[name])
            try:
                copy_snapshot(self.training, self.durable, name)
            except SnapshotExistsError as error:
                self._note(f"warning: {error.message}")
            else:
                for beaten in beaten_bests(self.durable.snapshots(), name, self.branch):
                    drop(self.durable, beaten)
            drop(self.training, name)

    def _publish_pinned(self, commit: Commit) -> None:
        """Publish a pinned step that a kill kept from it, so that the log tells steps in order."""
        head = self.durable.branches()[self.branch]
        if commit.branch == self.branch and commit.step > head.step:
            # One that somebody pinned on a line that was left is copied as a snapshot alone.
            with suppress(ConflictError):
                copy_commit(self.training, self.durable, commit.id, self.branch)


def _keep_last(store: Store, commits: int) -> None:
    policy = Policy(keep_last=commits)
    if branching.policy_of(store) != policy:
        branching.set_policy(store, policy)
