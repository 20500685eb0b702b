"""How many threads write and digest the shards of a store beside a step.

Knows nothing of stores.
"""

from __future__ import annotations

import os

from trainer.device import Device

WRITER_THREADS = 2
# One digests 7 GB/s where eight did 46: many more find no more memory bandwidth.
DIGEST_THREADS_MAX = 12


def writer_threads(device: Device) -> int:
    """Give the threads of the store that steps are made in, for where they are computed."""
    if device.is_host:
        return WRITER_THREADS
    # Where a GPU computes, the processor's cores are there to digest what it hands over.
    return max(WRITER_THREADS, min(DIGEST_THREADS_MAX, (os.cpu_count() or 1) - 4))
