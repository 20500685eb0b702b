"""A store as a plain dictionary, and the journal of what a workload has asked of the real one.

Owns the expected states: what the store must be after each call that returned, and what it may be
while one is under way. Knows nothing of files. Immutable values: a state is shared, never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

Tensors = Mapping[str, bytes]
# Repairs the closed store at a path, and says what is wrong with it.
Mend = Callable[[str], list[str]]


@dataclass(frozen=True, kw_only=True)
class ModelCommit:
    """What a commit holds: tensors' bytes by shard and name, the step that wrote each shard."""

    step: int
    shards: Mapping[str, Tensors]
    written: Mapping[str, int]
    state: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModelStore:
    """The head of each branch, the snapshots, and every commit that was ever made."""

    heads: Mapping[str, ModelCommit] = field(default_factory=dict)
    snapshots: Mapping[str, ModelCommit] = field(default_factory=dict)
    commits: tuple[ModelCommit, ...] = ()

    def with_commit(
        self,
        *,
        step: int,
        shards: Mapping[str, Tensors],
        state: Mapping[str, object],
        branch: str = "main",
    ) -> ModelStore:
        """The store after a commit that writes `shards` and carries the others over."""
        base = self.heads.get(branch)
        commit = ModelCommit(
            step=step,
            shards={**(base.shards if base else {}), **shards},
            written={**(base.written if base else {}), **dict.fromkeys(shards, step)},
            state=dict(state),
        )
        moved = self.with_branch(branch, commit)
        return replace(moved, commits=(*self.commits, commit))

    def with_branch(self, name: str, commit: ModelCommit) -> ModelStore:
        """The store with a branch made at, or moved to, a commit."""
        return replace(self, heads={**self.heads, name: commit})

    def without_branch(self, name: str) -> ModelStore:
        """The store after a branch was deleted."""
        return replace(self, heads={n: c for n, c in self.heads.items() if n != name})

    def with_snapshot(self, name: str, commit: ModelCommit) -> ModelStore:
        """The store with a commit pinned under a name."""
        return replace(self, snapshots={**self.snapshots, name: commit})

    def without_snapshot(self, name: str) -> ModelStore:
        """The store after a snapshot was deleted."""
        return replace(self, snapshots={n: c for n, c in self.snapshots.items() if n != name})


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What a crash may leave: `settled`, or `attempted` where a call was under way.

    None stands for no store at all: before its creation has returned. With `mend` the store is
    damaged and a repair is under way: it may be refused, and is what it was once it is mended.
    """

    settled: ModelStore | None
    attempted: ModelStore | None
    mend: Mend | None = None
    skipped: bool = False

    @property
    def may_be_absent(self) -> bool:
        return self.settled is None

    def allowed(self) -> list[ModelStore]:
        states = (self.settled or ModelStore(), self.attempted)
        return [state for state in states if state is not None]


class Journal:
    """The attempts of a workload and what was acknowledged, by position in the recorded log."""

    def __init__(self, position: Callable[[], int], *, start: Expectation | None = None) -> None:
        """Begin where nothing exists, or where a crash may have left one of two states."""
        self._position = position
        expectation = start or Expectation(settled=None, attempted=None)
        self._entries = [(-1, expectation)]

    @property
    def settled(self) -> ModelStore | None:
        """The state of the last call that returned."""
        return self._last().settled

    def attempt(self, state: ModelStore, *, mend: Mend | None = None) -> None:
        """A call begins that should lead to `state`; with `mend` it repairs a damaged store."""
        self._add(self._last().settled, state, mend=mend)

    def skip(self) -> None:
        """What follows, until the next entry, is the hand of the test: no crash is tried in it."""
        self._add(self._last().settled, None, skipped=True)

    def acknowledge(self) -> None:
        """The call under way has returned: its state is durable from here on."""
        self._add(self._last().attempted, None)

    def refuse(self) -> None:
        """The call under way has certainly not happened; what was damaged still is."""
        self._add(self._last().settled, None, mend=self._last().mend)

    def opened(self, state: ModelStore) -> None:
        """A store was opened and shown: what was shown must stay."""
        self._add(state, None)

    def at(self, operation: int) -> Expectation:
        """What a crash before `operation` may leave."""
        return [entry for position, entry in self._entries if position <= operation][-1]

    def _last(self) -> Expectation:
        return self._entries[-1][1]

    def _add(
        self,
        settled: ModelStore | None,
        attempted: ModelStore | None,
        *,
        mend: Mend | None = None,
        skipped: bool = False,
    ) -> None:
        entry = Expectation(settled=settled, attempted=attempted, mend=mend, skipped=skipped)
        self._entries.append((self._position(), entry))
