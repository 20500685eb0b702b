"""Serving a store while it is written to: every answer is held to the commit that it names.

`ask_while` asks a server that follows a branch, from several clients, until a time is over, while a
writer commits. What it gives is checked by the caller against what each commit must say.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import shardb
from serve.catalogue import Catalogue, StoreSource
from serve.chat_template import adapter
from serve.limits import Limits
from serve.scheduler import Scheduler, SchedulerOptions
from serve.service import Service
from shardb.errors import NotFoundError
from tests.support.byte_server import running_server
from tests.support.http_client import HttpClient, wait_for
from trainer.device import Device
from trainer.engine import Engine, EngineOptions
from trainer.generate import Sampling, generate_ids
from trainer.run_shards import read_recipe


@dataclass(frozen=True, kw_only=True)
class Told:
    """One answer: which commit it names, what was asked and what it says."""

    commit: str
    prompt: tuple[int, ...]
    text: str
    tokens: tuple[str, ...]


def word_tokenizer(size: int) -> bytes:
    """Give a tokenizer of the words t0, t1, … for models that learn plain numbers."""
    tokenizer = Tokenizer(models.WordLevel({f"t{n}": n for n in range(size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    return str(tokenizer.to_str()).encode()


@contextmanager
def following_server(
    store: Path, *, tokenizer: bytes | None = None, **options: Any
) -> Iterator[HttpClient]:
    """Serve the newest commit of a store with the real scheduler."""
    scheduler = Scheduler(SchedulerOptions(**{"kv_cache_bytes": 1 << 22, **options}))
    catalogue = Catalogue(
        [StoreSource(role="primary", path=str(store))],
        follow=True,
        chat=adapter("plain"),
        tokenizer_files=None if tokenizer is None else {"tokenizer.json": tokenizer},
    )
    service = Service(catalogue=catalogue, scheduler=scheduler, limits=Limits())
    with running_server(service) as (_, port):
        yield HttpClient(port=port)
    scheduler.close(drain=False)
    catalogue.close()


def ask_while(
    client: HttpClient, seconds: float, prompts: Sequence[Sequence[int]], *, clients: int = 4
) -> list[Told]:
    """Ask from several clients at once until the time is over; every answer must be whole."""
    told: list[Told] = []
    deadline = time.monotonic() + seconds

    def work(number: int) -> None:
        turn = number
        while time.monotonic() < deadline:
            prompt = prompts[turn % len(prompts)]
            told.append(ask_once(client, prompt, stream=turn % 3 == 0))
            turn += 1

    with ThreadPoolExecutor(clients) as pool:
        for each in [pool.submit(work, number) for number in range(clients)]:
            each.result()
    return told


def ask_once(client: HttpClient, prompt: Sequence[int], *, stream: bool) -> Told:
    """Ask for the likeliest tokens after a prompt."""
    body = {"model": "primary", "prompt": list(prompt), "max_tokens": 12, "temperature": 0}
    answer = client.ask("/v1/completions", {**body, "logprobs": 0, "stream": stream})
    assert answer.status == 200, answer.data
    rows = answer.events if stream else [answer.json]
    [commit] = {row["system_fingerprint"] for row in rows}
    choices = [row["choices"][0] for row in rows]
    tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    return Told(
        commit=commit,
        prompt=tuple(prompt),
        text="".join(choice["text"] for choice in choices),
        tokens=tuple(tokens),
    )


@contextmanager
def writing(write: Callable[[int], object], first_step: int) -> Iterator[Counter[str]]:
    """Write step after step in a thread for the length of a block; gives how many were written."""
    written: Counter[str] = Counter()
    stop = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while not stop.is_set():
                write(first_step + written["steps"])
                written["steps"] += 1
        except BaseException as error:  # noqa: BLE001 - raised again by the block that waits
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield written
    finally:
        stop.set()
        thread.join()
    assert not failures, failures


class Offline:
    """What the commits of a training run say, computed by the trainer's own engine."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._known: dict[tuple[str, tuple[int, ...]], tuple[str, ...]] = {}

    def differing(self, told: Sequence[Told]) -> list[Told]:
        """List the answers that their commit would not give."""
        with shardb.open(self._store) as opened:
            return [each for each in told if each.tokens != self._tokens(opened, each)]

    def _tokens(self, store: shardb.Store, told: Told) -> tuple[str, ...]:
        key = (told.commit, told.prompt)
        if key not in self._known:
            with store.at(commit=told.commit) as view:
                self._known[key] = tuple(f"t{n}" for n in _greedy(view, told.prompt))
        return self._known[key]


def _greedy(view: shardb.ReadView, prompt: Sequence[int]) -> list[int]:
    model = read_recipe(view).model
    engine = Engine(model, EngineOptions(), Device.from_name("cpu"))

    def next_logits(ids: Sequence[int]) -> torch.Tensor:
        batch = torch.from_numpy(np.array([ids], dtype=np.int64))
        return engine.logits(view, batch, last_only=True)[0, -1].float()

    greedy = Sampling(temperature=0)
    ids = generate_ids(
        next_logits, prompt, sampling=greedy, max_new_tokens=12, seed=0, end_id=model.eos_token_id
    )
    return list(ids)


def wait_for_commit(store: Path, step: int) -> None:
    """Wait until a store that is being made has a step."""

    def has_step() -> bool:
        try:
            with shardb.open(store) as opened:
                return opened.resolve().step >= step
        except NotFoundError:
            return False

    wait_for(has_step)
