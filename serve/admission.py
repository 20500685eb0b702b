"""Who takes part in the next sweep, with how many tokens and which pages.

Owns the running requests and their pages: admission, chunks of prompts, guesses, preemption when
pages run short. Knows nothing of threads or weights. Invariants: the longest-running request always
gets its pages, so something always goes on; a paused request loses no token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from serve.jobs import Job
from serve.kv_cache import PagedCache
from serve.pinned import PinnedModel
from serve.speculative import guess_next
from serve.sweep import Part


class Admission:
    """The requests that run, oldest first, and those that wait."""

    def __init__(
        self,
        cache_of: Callable[[PinnedModel], PagedCache],
        *,
        requests_max: int,
        prefill_tokens: int,
        guesses_max: int,
    ) -> None:
        self.running: list[Job] = []
        self.waiting: deque[Job] = deque()
        self.preemptions = 0
        self.prompt_tokens_reused = 0
        self._cache_of = cache_of
        self._requests_max = requests_max
        self._prefill_tokens = prefill_tokens
        self._guesses_max = guesses_max

    def remove_finished(self) -> Iterator[Job]:
        """Take out and give the requests that are over; their pages are free."""
        for job in [*self.running, *self.waiting]:
            if job.is_cancelled and not job.is_finished:
                job.finish("cancelled")
            if not job.is_finished:
                continue
            (self.running if job in self.running else self.waiting).remove(job)
            job.pause(self._cache_of(job.pinned))
            yield job

    def next_parts(self) -> list[Part]:
        """Admit who fits, and give what each running request does in the next sweep."""
        self._admit()
        budget = self._prefill_tokens
        parts: dict[int, Part] = {}
        for job in list(self.running):
            if job not in self.running:
                continue  # paused for an older one
            part = self._part(job, budget)
            if part is None or not self._give_pages(job, part):
                continue
            if part.count > 1:
                budget -= part.count
            parts[id(job)] = part
        return [parts[id(job)] for job in self.running if id(job) in parts]

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._requests_max:
            job = self.waiting[0]
            cache = self._cache_of(job.pinned)
            needed = -(-len(job.ids) // cache.geometry.page_tokens)
            if self.running and needed > cache.available_count:
                return
            self.waiting.popleft()
            job.cached_tokens = max(job.cached_tokens, found := job.begin(cache))
            self.prompt_tokens_reused += found
            self.running.append(job)

    def _part(self, job: Job, budget: int) -> Part | None:
        """Give a chunk of the prompt, or the one token that is due with guesses after it."""
        if job.calls_are_fixed:
            return self._fixed_part(job, budget)
        remaining = len(job.ids) - job.computed
        count = min(remaining, max(budget, 1))
        if remaining > 1 and budget <= 0:
            return None
        if job.wants_prompt_scores:
            return Part(job=job, count=count, guesses=(), logit_rows=count)
        guesses = self._guesses(job) if remaining == 1 else []
        rows = 1 + len(guesses) if count == remaining else 0
        return Part(job=job, count=count, guesses=guesses, logit_rows=rows)

    def _fixed_part(self, job: Job, budget: int) -> Part | None:
        """Give the call that is due: all that comes first in one piece, then token by token."""
        is_first = job.computed < job.first_call
        if is_first and budget <= 0:
            return None
        job.computed = 0 if is_first else job.computed
        count = job.first_call if is_first else 1
        is_last = job.computed + count == len(job.ids)
        rows = count if job.wants_prompt_scores else 1 if is_last else 0
        return Part(job=job, count=count, guesses=(), logit_rows=rows)

    def _guesses(self, job: Job) -> list[int]:
        """Guess only what could still be used: each guess and one token more are chosen."""
        useful = job.parameters.max_tokens - (len(job.ids) - job.prompt_length) - 1
        count = min(self._guesses_max, useful)
        return guess_next(job.ids, count) if count > 0 else []

    def _give_pages(self, job: Job, part: Part) -> bool:
        cache = self._cache_of(job.pinned)
        end = job.computed + part.count + len(part.guesses)
        missing = -(-end // cache.geometry.page_tokens) - len(job.pages)
        if missing <= 0:
            return True
        while (pages := cache.take(missing)) is None:
            youngest = next(j for j in reversed(self.running) if self._cache_of(j.pinned) is cache)
            self._pause(youngest)
            if youngest is job:
                return False
        job.pages.extend(pages)
        return True

    def _pause(self, job: Job) -> None:
        job.pause(self._cache_of(job.pinned))
        self.running.remove(job)
        self.waiting.appendleft(job)
        self.preemptions += 1
