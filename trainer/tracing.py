"""The timeline of a run's first steps, for `train --trace FILE`.

Owns how many steps are noted, the lane of the store, and when the file is written. What a device
did is noted by its lanes; the store's commits are timed by the host, from the same beginning. Knows
nothing of steps. Source of the form: `trainer.pipeline.trace`.
"""

from __future__ import annotations

import time
from pathlib import Path

from trainer.device_lanes import Lanes, Span
from trainer.errors import InputError
from trainer.pipeline.trace import write_trace

TRACED_STEPS = 20
STORE_LANE = "store"


class RunTrace:
    """Notes the spans of `TRACED_STEPS` steps and writes them, or those that there are at `close`.

    Raises:
        InputError: the file cannot be written; asked before anything is trained.
    """

    def __init__(self, path: Path, lanes: Lanes) -> None:
        self._path = path
        self._lanes = lanes
        self._steps = 0
        self._is_open = True
        self._spans: list[Span] = []
        self._write([])
        lanes.begin_trace()
        self._began = time.perf_counter()

    def committed(self, step: int, began: float, ended: float) -> None:
        """Note a commit, in seconds of the host's clock, and count its step."""
        if not self._is_open:
            return
        self._spans.append(
            Span(
                lane=STORE_LANE,
                name=f"commit {step}",
                began=began - self._began,
                ended=ended - self._began,
            )
        )
        self._steps += 1
        if self._steps >= TRACED_STEPS:
            self.close()

    def close(self) -> None:
        """Write what was noted, once."""
        if self._is_open:
            self._is_open = False
            self._write([*self._lanes.take_trace(), *self._spans])

    def _write(self, spans: list[Span]) -> None:
        try:
            write_trace(self._path, spans)
        except OSError as error:
            raise InputError(
                f"--trace {self._path}: {error.strerror}: give another file"
            ) from error
