"""A server in a thread of the test's process, with a scheduler that says what the test wants.

`ByteScheduler` follows the protocol of `serve.scheduler`: one worker thread, one `Finished` a
request, cancelling within one sweep.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from serve.catalogue import Catalogue, StoreSource
from serve.chat_template import ChatFormat, adapter
from serve.generation import Scheduling
from serve.limits import Limits
from serve.pinned import PinnedModel
from serve.requests import Finished, PromptLogprobs, SamplingParameters, Sink, TokenEvent
from serve.service import Service
from serve.statistics import SchedulerStatistics
from serve.web_server import Server, make_server
from shardb.errors import ShardbError
from tests.support.byte_model import END_ID, ids_of
from tests.support.http_client import HttpClient, wait_for


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the scheduler was asked."""

    pinned: PinnedModel
    prompt_ids: tuple[int, ...]
    parameters: SamplingParameters


Script = Callable[[Asked], Sequence[int]]


@dataclass(kw_only=True, eq=False)
class ByteJob:
    """A request of the scheduler."""

    asked: Asked
    sink: Sink
    tokens: Iterator[int] = field(default_factory=lambda: iter(()))
    said: int = 0
    begun: bool = False
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class ByteScheduler:
    """Says what a script says, one token of every running request a sweep."""

    def __init__(self, script: Script, *, sweep_seconds: float = 0.0) -> None:
        self.script = script
        self.sweep_seconds = sweep_seconds
        self.fault: ShardbError | None = None
        self.held = threading.Event()  # while set, only cancelled requests move
        self.asked: list[Asked] = []
        self.ended: list[str] = []
        self.sweeps = 0
        self._jobs: list[ByteJob] = []
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(
        self,
        pinned: PinnedModel,
        prompt_ids: Sequence[int],
        parameters: SamplingParameters,
        sink: Sink,
    ) -> ByteJob:
        asked = Asked(pinned=pinned.retain(), prompt_ids=tuple(prompt_ids), parameters=parameters)
        job = ByteJob(asked=asked, sink=sink)
        with self._lock:
            self.asked.append(asked)
            self._jobs.append(job)
        self._work.set()
        return job

    def preload(self, pinned: PinnedModel) -> None:
        pinned.verify_shard()

    def statistics(self) -> SchedulerStatistics:
        with self._lock:
            return SchedulerStatistics(sweeps=self.sweeps, requests_running=len(self._jobs))

    def close(self, drain: bool = True, timeout_seconds: float = 30.0) -> None:
        for job in [] if drain else list(self._jobs):
            job.cancel()
        self._closed = True
        self._work.set()
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while True:
            self._work.wait()
            with self._lock:
                jobs = list(self._jobs)
                if not jobs:
                    self._work.clear()
            if not jobs and self._closed:
                return
            for job in jobs:
                if job.cancelled or not self.held.is_set():
                    self._step(job)
            with self._lock:
                self.sweeps += not self.held.is_set()
            time.sleep(self.sweep_seconds or 0.0002)

    def _step(self, job: ByteJob) -> None:
        parameters = job.asked.parameters
        if not job.begun:
            job.begun = True
            job.tokens = iter(self.script(job.asked))
            if parameters.prompt_logprobs:
                job.sink(_prompt_logprobs(job.asked))
        end = self._end_of(job)
        if end is None:
            token = next(job.tokens, END_ID)
            ends = parameters.stop_token_ids | (set() if parameters.ignore_eos else {END_ID})
            if token in ends:
                end = Finished(reason="stop", stop_token_id=token)
            else:
                job.said += 1
                top = tuple((token + n, -0.5 - n) for n in range(parameters.top_logprobs or 0))
                job.sink(TokenEvent(token_id=token, logprob=-0.5, top=top))
        if end is not None:
            self._end(job, end)

    def _end_of(self, job: ByteJob) -> Finished | None:
        if job.cancelled:
            return Finished(reason="cancelled")
        if self.fault is not None:
            return Finished(reason="error", error=self.fault)
        is_full = job.said >= job.asked.parameters.max_tokens
        return Finished(reason="length") if is_full else None

    def _end(self, job: ByteJob, event: Finished) -> None:
        with self._lock:
            self._jobs.remove(job)
            self.ended.append(event.reason)
        job.asked.pinned.release()
        job.sink(event)


def _prompt_logprobs(asked: Asked) -> PromptLogprobs:
    ids = asked.prompt_ids
    count = min(1, asked.parameters.top_logprobs or 0)
    return PromptLogprobs(
        token_ids=ids,
        logprobs=(None, *(-1.0 for _ in ids[1:])),
        top=tuple(tuple((token, -1.0) for _ in range(count)) for token in ids),
    )


def says(text: str | bytes) -> Script:
    """Give a script that says one text to everybody, then ends."""
    ids = ids_of(text)
    return lambda _: ids


@dataclass(frozen=True, kw_only=True)
class ByteServer(HttpClient):
    """A running server."""

    service: Service
    scheduler: ByteScheduler
    server: Server

    def wait_until_idle(self) -> None:
        """Wait until no answer is being made, here and in the scheduler."""
        wait_for(lambda: self.service.admission.active == 0)
        wait_for(lambda: self.scheduler.statistics().requests_running == 0)

    def leases(self) -> int:
        """Count the leases on all stores served."""
        stores = self.service.catalogue.stores
        return sum(len(store.models.store.leases.leased_commits()) for store in stores)


@contextmanager
def byte_server(
    store: Path,
    script: Script,
    *,
    limits: Limits | None = None,
    chat: ChatFormat | None = None,
    backup: Path | None = None,
    follow: bool = False,
    api_keys: Sequence[str] = (),
    sweep_seconds: float = 0.0,
) -> Iterator[ByteServer]:
    """Run a server for the length of a block."""
    scheduler = ByteScheduler(script, sweep_seconds=sweep_seconds)
    places = [("primary", store), *([("backup", backup)] if backup else [])]
    service = service_of(
        places, scheduler, limits=limits, chat=chat, follow=follow, api_keys=api_keys
    )
    with running_server(service) as (server, port):
        yield ByteServer(port=port, service=service, scheduler=scheduler, server=server)
    scheduler.close(drain=False)
    service.catalogue.close()


def service_of(
    places: Sequence[tuple[str, Path]],
    scheduler: Scheduling,
    *,
    limits: Limits | None = None,
    chat: ChatFormat | None = None,
    follow: bool = False,
    api_keys: Sequence[str] = (),
) -> Service:
    """Give the parts of a server."""
    catalogue = Catalogue(
        [StoreSource(role=role, path=str(path)) for role, path in places],
        follow=follow,
        chat=chat or adapter("plain"),
    )
    return Service(
        catalogue=catalogue,
        scheduler=scheduler,
        limits=limits or Limits(),
        api_keys=tuple(api_keys),
    )


@contextmanager
def running_server(service: Service) -> Iterator[tuple[Server, int]]:
    """Run the sockets of a service in a thread; gives their port too."""
    server = make_server(service, host="127.0.0.1", port=0, drain_seconds=1)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield server, server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not end"
