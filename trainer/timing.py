"""Where a step's seconds go: named buckets of wall-clock time.

Knows nothing of what it times. Buckets may overlap with background work, never with each other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

BUCKETS = (
    "param_load_seconds",
    "h2d_seconds",
    "forward_kernel_seconds",
    "head_kernel_seconds",
    "backward_kernel_seconds",
    "gradient_cpu_copy_seconds",
    "optimizer_load_seconds",
    "optimizer_math_seconds",
    "param_save_stage_seconds",
    "optimizer_save_stage_seconds",
)


class StepClock:
    """Adds up seconds by bucket."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(BUCKETS, 0.0)

    @contextmanager
    def measure(self, bucket: str) -> Iterator[None]:
        """Add the time inside the block to `bucket`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[bucket] += time.perf_counter() - started
