"""The scheduler: every running request moves through the stages together.

Owns the worker thread and the life of every request. Knows nothing of text or HTTP. Invariants: the
sink is called from the worker thread alone; every accepted request ends with exactly one
`Finished`, which is sent when its pages and its hold on the commit are given up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from serve.admission import Admission
from serve.decoder import Decoder, RowsPassage
from serve.jobs import Job
from serve.kv_cache import CacheGeometry, PagedCache
from serve.pinned import PinnedModel
from serve.request_check import check_request
from serve.requests import SamplingParameters, Sink
from serve.residency import StageShelf
from serve.row_products import RowProducts
from serve.statistics import SchedulerStatistics
from serve.sweep import ModelGroup, Part, Passage, run_sweep
from serve.sweep_batch import Span, build_batch
from serve.weights import DTYPES, StagePlace, stage_places
from shardb.errors import ShardbError, UsageError
from trainer.device import Device

__all__ = ["Job", "Scheduler", "SchedulerOptions"]

LOG = logging.getLogger(__name__)
PAGE_TOKENS_MULTIPLE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerOptions:
    """What a scheduler may use.

    dtype: fp32, bf16 or fp16; max_resident_bytes: memory for stages that stay, None for all of
    them, 0 for none; kv_cache_bytes: memory for keys and values, of kv_page_tokens tokens a page;
    prefill_chunk: prompt tokens a sweep; preload: bring a model's stages in when it is first named
    (whoever names models calls `Scheduler.preload`); ngram_speculation: tokens guessed a sweep from
    what was said before, 0 for none.
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

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype is {self.dtype!r}: choose from {', '.join(DTYPES)}")
        if self.kv_page_tokens < 1 or self.kv_page_tokens % PAGE_TOKENS_MULTIPLE:
            raise UsageError(
                f"kv_page_tokens is {self.kv_page_tokens}: give a multiple of"
                f" {PAGE_TOKENS_MULTIPLE}"
            )
        for name in ("prefill_chunk", "max_requests_per_sweep"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}: give 1 or more")
        for name in ("max_resident_bytes", "ngram_speculation"):
            if (getattr(self, name) or 0) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}: give 0 or more")


class Scheduler:
    """Serves requests on one worker thread; every method may be called from any thread."""

    def __init__(self, options: SchedulerOptions) -> None:
        self.options = options
        self._device = Device.from_name(options.device)
        self._dtype = DTYPES[options.dtype]
        products = RowProducts(self._dtype, is_host=self._device.is_host)
        self._decoder = Decoder(products, self._dtype)
        self._shelf = StageShelf(self._device, self._dtype, products, options.max_resident_bytes)
        self._caches: dict[CacheGeometry, PagedCache] = {}
        self._places: dict[int, list[StagePlace]] = {}
        self._admission = Admission(
            self._cache_of,
            requests_max=options.max_requests_per_sweep,
            prefill_tokens=options.prefill_chunk,
            guesses_max=options.ngram_speculation,
        )
        self._counts: Counter[str] = Counter()
        self._sweep_seconds = 0.0
        self._changed = threading.Condition()
        self._arrived: list[Job] = []
        self._errands: list[tuple[Callable[[], None], Future[None]]] = []
        self._state = "open"
        self._worker = threading.Thread(target=self._work, name="sweeps", daemon=True)
        self._worker.start()

    # For any thread

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
        job = Job(pinned, prompt_ids, parameters, sink, self._wake)
        check_request(
            job,
            page_tokens=self.options.kv_page_tokens,
            page_count=self.options.kv_cache_bytes // self._geometry(pinned).page_bytes,
            prompt_scores_max=self.options.prefill_chunk,
        )
        with self._changed:
            if self._state != "open":
                raise UsageError("the scheduler is closed: no request is taken any more")
            pinned.retain()
            self._arrived.append(job)
            self._changed.notify()
        return job

    def preload(self, pinned: PinnedModel) -> None:
        """Bring the stages in that may stay, before the first request; waits until they are.

        Raises:
            CorruptionError: a stage cannot be read.
        """
        self._run_in_worker(lambda: self._load(pinned))

    def forget_prefixes(self) -> None:
        """Forget the keys and values that no request holds, so that nothing is found again."""
        self._run_in_worker(self._forget_idle)

    def statistics(self) -> SchedulerStatistics:
        """Give the counts so far."""
        caches = list(self._caches.values())
        return SchedulerStatistics(
            sweep_seconds=self._sweep_seconds,
            requests_running=len(self._admission.running),
            requests_waiting=len(self._admission.waiting) + len(self._arrived),
            prompt_tokens_reused=self._admission.prompt_tokens_reused,
            preemptions=self._admission.preemptions,
            bytes_read=self._shelf.bytes_read,
            read_seconds=self._shelf.read_seconds,
            wait_seconds=self._shelf.wait_seconds,
            resident_bytes=self._shelf.resident_bytes,
            resident_stages=self._shelf.resident_stages,
            kv_bytes_used=sum(cache.used_bytes for cache in caches),
            kv_bytes_total=self.options.kv_cache_bytes,
            **dict(self._counts),
        )

    def close(self, drain: bool = True, timeout_seconds: float = 30.0) -> None:
        """End the worker: after what is queued has finished, or by cancelling it.

        What has not finished after `timeout_seconds` is cancelled too.
        """
        with self._changed:
            if self._state == "open":
                self._state = "draining" if drain else "cancelling"
            self._changed.notify()
        self._worker.join(timeout_seconds if drain else None)
        if self._worker.is_alive():
            with self._changed:
                self._state = "cancelling"
                self._changed.notify()
            self._worker.join()

    def _run_in_worker(self, errand: Callable[[], None]) -> None:
        done: Future[None] = Future()
        with self._changed:
            if self._state != "open":
                raise UsageError("the scheduler is closed: it does nothing any more")
            self._errands.append((errand, done))
            self._changed.notify()
        done.result()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    # The worker

    def _work(self) -> None:
        with torch.inference_mode():
            while self._wait_for_work():
                try:
                    self._turn()
                except Exception as error:
                    LOG.exception("a sweep failed: its requests end with an error")
                    self._fail_all(error)
        self._shelf.close()

    def _turn(self) -> None:
        self._run_errands()
        self._end_finished()
        parts = self._admission.next_parts()
        if parts:
            self._sweep(parts)
        self._end_finished()

    def _fail_all(self, error: Exception) -> None:
        failure = ShardbError(f"serving failed: {type(error).__name__}: {error}")
        for job in self._admission.running:
            job.finish("error", error=failure)

    def _wait_for_work(self) -> bool:
        """Take over what has arrived; False when all is done and the scheduler closed."""
        admission = self._admission
        with self._changed:
            while self._state == "open" and not (
                self._arrived or self._errands or admission.running or admission.waiting
            ):
                self._changed.wait()
            admission.waiting.extend(self._arrived)
            self._arrived.clear()
            if self._state == "cancelling":
                for job in [*admission.running, *admission.waiting]:
                    job.is_cancelled = True
            busy = admission.running or admission.waiting or self._errands
            return self._state == "open" or bool(busy)

    def _run_errands(self) -> None:
        while self._errands:
            errand, done = self._errands.pop(0)
            try:
                errand()
            except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for it
                done.set_exception(error)
            else:
                done.set_result(None)

    def _forget_idle(self) -> None:
        for cache in self._caches.values():
            cache.forget_idle()

    def _load(self, pinned: PinnedModel) -> None:
        places = stage_places(pinned)
        self._shelf.begin_sweep(places)
        try:
            for place in places:
                self._shelf.take(place)
        finally:
            self._shelf.settle()

    def _sweep(self, parts: Sequence[Part]) -> None:
        started = time.perf_counter()
        groups = self._groups(parts)
        run_sweep(groups, self._shelf)
        for group in groups:
            self._tell(group)
        self._counts["sweeps"] += 1
        self._counts["requests_in_sweeps"] += len(parts)
        self._sweep_seconds += time.perf_counter() - started

    def _groups(self, parts: Sequence[Part]) -> list[ModelGroup]:
        by_commit: dict[tuple[str, CacheGeometry], list[Part]] = {}
        for part in parts:
            key = (part.job.pinned.commit.id, self._geometry(part.job.pinned))
            by_commit.setdefault(key, []).append(part)
        return [self._group(found) for found in by_commit.values()]

    def _group(self, parts: Sequence[Part]) -> ModelGroup:
        pinned = parts[0].job.pinned
        spans = [
            Span(
                ids=[*job.ids[job.computed : job.computed + part.count], *part.guesses],
                start=job.computed,
                pages=job.pages,
                logit_rows=part.logit_rows,
            )
            for part in parts
            for job in (part.job,)
        ]
        if id(pinned) not in self._places:
            self._places[id(pinned)] = stage_places(pinned)
        return ModelGroup(
            places=self._places[id(pinned)],
            parts=parts,
            passage=self._passage(pinned, spans),
            cache=self._cache_of(pinned),
        )

    def _passage(self, pinned: PinnedModel, spans: Sequence[Span]) -> Passage:
        config, cache = pinned.config, self._cache_of(pinned)
        if config.hf_config:
            from serve.hf_passage import HfPassage  # transformers is an extra, and slow to load

            return HfPassage(spans, config, cache)
        batch = build_batch(
            spans,
            config,
            page_tokens=self.options.kv_page_tokens,
            dtype=self._dtype,
            device=self._device.torch_device,
        )
        return RowsPassage(self._decoder, batch, config, cache)

    def _tell(self, group: ModelGroup) -> None:
        """Give every request its logits, or the error that its model met."""
        start = 0
        for part in group.parts:
            end = start + part.logit_rows
            logits = group.passage.logits
            rows = logits[start:end] if logits is not None and end > start else None
            start = end
            try:
                if group.error is not None:
                    raise group.error
                self._advance(part, rows, group.cache)
            except ShardbError as error:
                part.job.finish("error", error=error)

    def _advance(self, part: Part, logits: Tensor | None, cache: PagedCache) -> None:
        job, first = part.job, part.job.computed
        is_prompt = first < job.prompt_length
        job.computed += part.count
        self._counts["prompt_tokens"] += part.count if is_prompt else 0
        job.name_pages(cache)
        if logits is None:
            return
        if job.wants_prompt_scores:
            job.score_prompt(logits, first)
            if job.computed < len(job.ids):
                return
            job.tell_prompt()
            logits = logits[-1:]
        if job.parameters.max_tokens == 0:
            job.finish("length")
            return
        self._choose(job, part, logits)
        job.name_pages(cache)

    def _choose(self, job: Job, part: Part, logits: Tensor) -> None:
        """Choose tokens for as long as each guess was the token chosen."""
        self._counts["drafted_tokens"] += len(part.guesses)
        before = len(job.ids)
        for logits_V, guess in zip(logits, [*part.guesses, None], strict=True):
            chosen = job.choose_next(logits_V)
            if chosen is None or chosen != guess:
                break
            job.computed += 1
            self._counts["accepted_tokens"] += 1
        self._counts["generated_tokens"] += len(job.ids) - before

    def _end_finished(self) -> None:
        for job in self._admission.remove_finished():
            name = {"stop": "stopped", "length": "at_length", "error": "failed"}
            self._counts[f"requests_{name.get(job.reason or '', 'cancelled')}"] += 1
            try:
                self._release(job.pinned)
            finally:
                job.tell_end()

    def _release(self, pinned: PinnedModel) -> None:
        """Give a request's hold on its commit up, once nothing is being read from it."""
        others = [*self._admission.running, *self._admission.waiting]
        if not any(job.pinned is pinned for job in others):
            self._shelf.settle()
            self._places.pop(id(pinned), None)
        pinned.release()

    # Caches

    def _geometry(self, pinned: PinnedModel) -> CacheGeometry:
        config = pinned.config
        return CacheGeometry(
            layers=config.num_layers,
            key_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            page_tokens=self.options.kv_page_tokens,
            dtype=self._dtype,
        )

    def _cache_of(self, pinned: PinnedModel) -> PagedCache:
        geometry = self._geometry(pinned)
        cache = self._caches.get(geometry)
        if cache is None:
            for other in [key for key, each in self._caches.items() if not each.used_bytes]:
                del self._caches[other]
            cache = self._caches[geometry] = PagedCache(
                geometry, self.options.kv_cache_bytes, self._device.torch_device
            )
        return cache
