"""Working on many pieces with a few threads.

Owns the order and the bound: results come in the order of the pieces, and at most a few of them
are in memory at a time. Knows nothing of what is done. The first failure ends the whole.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

THREADS_MAX = 4
PENDING_PER_THREAD = 2
Piece = TypeVar("Piece")
Result = TypeVar("Result")


def threads_here() -> int:
    """How many threads work on one object."""
    return max(1, min(THREADS_MAX, os.cpu_count() or 1))


def in_order(
    work: Callable[[Piece], Result], pieces: Sequence[Piece], *, threads: int
) -> Iterator[Result]:
    """The result for each piece, in order; with one thread, or one piece, no thread is made."""
    if threads <= 1 or len(pieces) <= 1:
        yield from map(work, pieces)
        return
    waiting: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="shardb-pack")
    try:
        for piece in pieces:
            waiting.append(pool.submit(work, piece))
            if len(waiting) >= PENDING_PER_THREAD * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
