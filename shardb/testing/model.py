"""A store as a plain dictionary, and the journal of what a workload has asked of the real one.

Owns the expected states: what the store must be after each call that returned, and what it may be
while one is under way. Knows nothing of files. Immutable values: a state is shared, never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

Tensors = Mapping[str, bytes]


@dataclass(frozen=True, kw_only=True)
class ModelCommit:
    """What a commit holds: tensors' bytes by shard and name, the step that wrote each shard."""

    step: int
    shards: Mapping[str, Tensors]
    written: Mapping[str, int]
    state: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModelStore:
    """Every commit of each branch, oldest first, and the snapshots."""

    branches: Mapping[str, tuple[ModelCommit, ...]] = field(default_factory=dict)
    snapshots: Mapping[str, ModelCommit] = field(default_factory=dict)

    def head(self, branch: str = "main") -> ModelCommit | None:
        commits = self.branches.get(branch, ())
        return commits[-1] if commits else None

    def with_commit(
        self,
        *,
        step: int,
        shards: Mapping[str, Tensors],
        state: Mapping[str, object],
        branch: str = "main",
    ) -> ModelStore:
        """The store after a commit that writes `shards` and carries the others over."""
        base = self.head(branch)
        commit = ModelCommit(
            step=step,
            shards={**(base.shards if base else {}), **shards},
            written={**(base.written if base else {}), **dict.fromkeys(shards, step)},
            state=dict(state),
        )
        history = (*self.branches.get(branch, ()), commit)
        return replace(self, branches={**self.branches, branch: history})

    def with_snapshot(self, name: str, commit: ModelCommit) -> ModelStore:
        return replace(self, snapshots={**self.snapshots, name: commit})

    def heads(self) -> dict[str, ModelCommit]:
        return {name: commits[-1] for name, commits in self.branches.items() if commits}

    def made(self, commit: ModelCommit) -> bool:
        """Whether the commit was ever made."""
        known = [c for commits in self.branches.values() for c in commits]
        return commit in known or commit in self.snapshots.values()


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What a crash may leave: `settled`, or `attempted` where a call was under way.

    None stands for no store at all: before its creation has returned.
    """

    settled: ModelStore | None
    attempted: ModelStore | None

    @property
    def may_be_absent(self) -> bool:
        return self.settled is None

    def allowed(self) -> list[ModelStore]:
        states = (self.settled or ModelStore(), self.attempted)
        return [state for state in states if state is not None]


@dataclass(frozen=True, kw_only=True)
class _Entry:
    position: int
    settled: ModelStore | None
    attempted: ModelStore | None


class Journal:
    """The attempts of a workload and what was acknowledged, by position in the recorded log."""

    def __init__(self, position: Callable[[], int]) -> None:
        self._position = position
        self._entries = [_Entry(position=-1, settled=None, attempted=None)]

    @property
    def settled(self) -> ModelStore | None:
        """The state of the last call that returned."""
        return self._entries[-1].settled

    def attempt(self, state: ModelStore) -> None:
        """A call begins that should lead to `state`."""
        last = self._entries[-1]
        self._add(last.settled, state)

    def acknowledge(self) -> None:
        """The call under way has returned: its state is durable from here on."""
        self._add(self._entries[-1].attempted, None)

    def refuse(self) -> None:
        """The call under way has certainly not happened."""
        self._add(self._entries[-1].settled, None)

    def at(self, operation: int) -> Expectation:
        """What a crash before `operation` may leave."""
        entry = [e for e in self._entries if e.position <= operation][-1]
        return Expectation(settled=entry.settled, attempted=entry.attempted)

    def _add(self, settled: ModelStore | None, attempted: ModelStore | None) -> None:
        entry = _Entry(position=self._position(), settled=settled, attempted=attempted)
        self._entries.append(entry)
