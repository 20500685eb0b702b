"""The scheduler: every running request moves through the stages together.

Owns the queue, the worker thread and the life of every request. Knows nothing of text or HTTP.
Invariants: the sink is called from the worker thread alone; every accepted request ends with
exactly one `Finished`; its commit stays leased until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serve.pinned import PinnedModel
from serve.requests import SamplingParameters, Sink
from serve.statistics import SchedulerStatistics


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerOptions:
    """What a scheduler may use.

    max_resident_bytes: memory for stages that stay; None for all of them, 0 for none;
    kv_cache_bytes: memory for keys and values; prefill_chunk: prompt tokens a sweep;
    preload: bring a model's stages in when it is first named; ngram_speculation: tokens guessed a
    sweep from what was said before, 0 for none.
    """

    device: str = "cpu"
    dtype: str = "fp32"
    max_resident_bytes: int | None = None
    kv_cache_bytes: int = 1 << 30
    kv_page_tokens: int = 32
    prefill_chunk: int = 512
    max_requests_per_sweep: int = 64
    preload: bool = False
    ngram_speculation: int = 0


class Job:
    """A submitted request."""

    def cancel(self) -> None:
        """Stop within one sweep; the last event is then Finished("cancelled")."""
        raise NotImplementedError


class Scheduler:
    """Serves requests on one worker thread; every method may be called from any thread."""

    def __init__(self, options: SchedulerOptions) -> None:
        self.options = options

    def submit(
        self,
        pinned: PinnedModel,
        prompt_ids: Sequence[int],
        parameters: SamplingParameters,
        sink: Sink,
    ) -> Job:
        """Queue a request; the scheduler retains `pinned` until the request has finished.

        Raises:
            UsageError: empty prompt, ids outside the vocabulary, prompt and answer longer than the
                model's window or than the cache, or the scheduler is closed.
        """
        raise NotImplementedError

    def preload(self, pinned: PinnedModel) -> None:
        """Bring the stages in that may stay, before the first request; waits until they are."""
        raise NotImplementedError

    def statistics(self) -> SchedulerStatistics:
        """Give the counts so far."""
        raise NotImplementedError

    def close(self, drain: bool = True, timeout_seconds: float = 30.0) -> None:
        """End the worker: after what is queued has finished, or by cancelling it."""
        raise NotImplementedError
