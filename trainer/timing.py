"""Where a step's seconds go: named buckets of wall-clock time.

Knows nothing of what it times. Buckets may overlap with background work, never with each other.
Devices work behind the caller's back: unless the clock is told to wait for them, a bucket holds the
time it took to ask for the work, and what was still running counts where it is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BUCKETS = (
    "param_load_seconds",
    # Stages are functions and nothing is built: kept at 0, so that older plots find their name.
    "module_build_seconds",
    "h2d_seconds",
    "forward_kernel_seconds",
    "head_kernel_seconds",
    "backward_kernel_seconds",
    "activation_cpu_copy_seconds",
    "gradient_cpu_copy_seconds",
    "optimizer_load_seconds",
    "optimizer_math_seconds",
    "param_save_stage_seconds",
    "optimizer_save_stage_seconds",
)


class StepClock:
    """Adds up seconds by bucket; `wait` is called at both ends of every timing."""

    def __init__(self, wait: Callable[[], None] | None = None) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(BUCKETS, 0.0)
        self._wait = wait or _no_wait

    @contextmanager
    def measure(self, bucket: str) -> Iterator[None]:
        """Add the time inside the block to `bucket`."""
        self._wait()
        started = time.perf_counter()
        try:
            yield
            self._wait()
        finally:
            self.seconds[bucket] += time.perf_counter() - started


def _no_wait() -> None:
    """Let devices work on."""
