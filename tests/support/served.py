"""Requests to a scheduler in tests, and stores of tiny models to serve."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import shardb
from serve.pinned import PinnedModel
from serve.requests import Event, Finished, PromptLogprobs, SamplingParameters, TokenEvent
from serve.scheduler import Job, Scheduler, SchedulerOptions
from shardb.records import Commit
from trainer.device import Device
from trainer.engine import Engine, EngineOptions
from trainer.model.config import ModelConfig
from trainer.model.stored import MODEL_SHARD

WAIT_SECONDS = 60


@dataclass
class Answer:
    """What one request was sent."""

    job: Job | None = None
    events: list[Event] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: Event) -> None:
        assert not self.ended.is_set(), "an event came after the last one"
        self.events.append(event)
        if isinstance(event, Finished):
            self.ended.set()

    def wait(self) -> Answer:
        assert self.ended.wait(WAIT_SECONDS), "the request did not end"
        return self

    @property
    def tokens(self) -> list[int]:
        return [event.token_id for event in self.events if isinstance(event, TokenEvent)]

    @property
    def scored(self) -> list[tuple[int, float]]:
        """Tokens with their log-probabilities: equal only if every bit is."""
        return [(e.token_id, e.logprob) for e in self.events if isinstance(e, TokenEvent)]

    @property
    def prompt(self) -> PromptLogprobs:
        [found] = [event for event in self.events if isinstance(event, PromptLogprobs)]
        return found

    @property
    def finished(self) -> Finished:
        found = self.events[-1]
        assert isinstance(found, Finished)
        return found


@contextmanager
def scheduler(**options: Any) -> Iterator[Scheduler]:
    """A scheduler with a small cache, closed at the end."""
    small = {"kv_cache_bytes": 1 << 22, "kv_page_tokens": 16}
    opened = Scheduler(SchedulerOptions(**{**small, **options}))
    try:
        yield opened
    finally:
        opened.close(drain=False)


def ask(
    to: Scheduler, pinned: PinnedModel, prompt: Sequence[int], max_tokens: int = 8, **more: Any
) -> Answer:
    """Submit a request, greedy unless told otherwise."""
    answer = Answer()
    parameters = SamplingParameters(
        **{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **more}
    )
    answer.job = to.submit(pinned, prompt, parameters, answer)
    return answer


def write_model(root: Path, config: ModelConfig, *, seed: int = 0, step: int = 0) -> Commit:
    """Commit first values of a model, as a training run would."""
    engine = Engine(config, EngineOptions(), Device.from_name("cpu"))
    with shardb.open(root, create=True) as store, store.begin("main") as txn:
        engine.initialise(txn, seed)
        data = json.dumps(config.to_json(), sort_keys=True).encode()
        txn.write(MODEL_SHARD, {"json": np.frombuffer(data, dtype=np.uint8)}, trainable=False)
        return txn.commit(step=step, state={}, metrics={})


def prompts(count: int, vocab_size: int, *, longest: int = 30) -> list[list[int]]:
    """Give prompts of many lengths."""
    draw = np.random.default_rng(count)
    lengths = draw.integers(1, longest + 1, count)
    return [draw.integers(0, vocab_size, length).tolist() for length in lengths]
