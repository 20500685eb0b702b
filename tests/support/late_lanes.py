"""Lanes whose copies are made as late as a device may make them: when somebody waits for them.

Owns the queues of the lanes that copy; what computes and updates is done at once. On the host's own
lanes every copy is done when the call returns, so a wait that is missing, or one for the wrong
mark, shows nothing there. Here it reads what was there before. Knows nothing of a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardb.views import StagedShard
from trainer.device_lanes import HostLanes, Lane, Mark
from trainer.pipeline.sealing import Sealer

LATE = frozenset(
    {Lane.PARAMS_IN, Lane.STATE_IN, Lane.ACTIVATIONS_IN, Lane.OUT, Lane.OUT_LATER, Lane.TOLD}
)
CHANGES = (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar)
Work = Callable[[], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class LateMark:
    """A point in a lane that copies: what was asked for before it."""

    lane: Lane
    asked: int


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what would change a tensor, and lets everything else be done."""

    def __init__(self, noted: Callable[[Work], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noted = noted

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in CHANGES:
            self._noted(lambda: func(*args, **(kwargs or {})))
            return args[0]
        assert not func._schema.is_mutable, func
        return func(*args, **(kwargs or {}))


class LateLanes(HostLanes):
    """The host's lanes, with copies that wait; lanes in `deaf` wait for nobody."""

    def __init__(self, deaf: Sequence[Lane] = ()) -> None:
        super().__init__()
        self._deaf = deaf
        self._queues: dict[Lane, deque[Work]] = {lane: deque() for lane in LATE}
        self._asked = dict.fromkeys(LATE, 0)

    @contextmanager
    def on(self, lane: Lane, name: str = "") -> Iterator[None]:
        if lane not in LATE:
            yield
            return
        with _Noting(lambda work: self._ask(lane, work)):
            yield

    def mark(self, lane: Lane, *, for_host: bool = False) -> Mark | None:
        return LateMark(lane=lane, asked=self._asked[lane]) if lane in LATE else None

    def wait(self, lane: Lane, mark: Mark | None) -> None:
        if lane in self._deaf or mark is None:
            return
        if lane in LATE:
            self._ask(lane, lambda: self.arrive(mark))
        else:
            self.arrive(mark)

    def arrive(self, mark: Mark | None) -> None:
        if mark is None:
            return
        assert isinstance(mark, LateMark)
        queue = self._queues[mark.lane]
        while self._asked[mark.lane] - len(queue) < mark.asked:
            queue.popleft()()

    def finish(self) -> None:
        """Make every copy."""
        for lane in LATE:
            self.arrive(self.mark(lane))

    def _ask(self, lane: Lane, work: Work) -> None:
        self._queues[lane].append(work)
        self._asked[lane] += 1


class LateSealer(Sealer):
    """Seals when it is drained and no sooner; lanes in `deaf` are not waited for."""

    def __init__(self, lanes: LateLanes, *, deaf: Sequence[Lane] = ()) -> None:
        super().__init__(lanes, in_background=False)
        self._deaf = deaf
        self._late: list[Work] = []

    def seal(self, lane: Lane, shards: Sequence[StagedShard]) -> None:
        arrived = None if lane in self._deaf else self._lanes.mark(lane)
        self._late.append(lambda: self._seal(arrived, shards))

    def fill(self, lane: Lane, sizes: Sequence[tuple[StagedShard, int]]) -> None:
        """Nothing digests here."""

    def drain(self) -> None:
        late, self._late = self._late, []
        for work in late:
            work()
        super().drain()

    def abandon(self) -> None:
        self._late.clear()
        super().abandon()
