"""The server's parts, and one request's way through them.

Owns what all routes share: the stores, the scheduler, the counts, and the life of an answering.
Knows nothing of routes. Invariants: whatever ends an answering, its model is released, its place
given back and its tokens counted, once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from serve.catalogue import Catalogue, Model
from serve.errors import ApiError, bad_value, of_store, stopping
from serve.generation import Generation, Plan, Scheduling
from serve.limits import Admission, Limits, Ticket
from serve.metrics import Metrics
from serve.openai_requests import Prompt
from serve.sampling_fields import Wanted
from serve.sse import StreamLimits
from shardb.errors import ShardbError

T = TypeVar("T")
# Texts beyond this are encoded in a thread of their own, so that others need not wait.
LONG_TEXT_CHARACTERS = 1 << 14


@dataclass(kw_only=True)
class Service:
    """Everything a route may use."""

    catalogue: Catalogue
    scheduler: Scheduling
    limits: Limits
    api_keys: Sequence[str] = ()
    admission: Admission = field(init=False)
    metrics: Metrics = field(default_factory=Metrics)
    is_stopping: bool = False

    def __post_init__(self) -> None:
        self.admission = Admission(self.limits)

    @property
    def stream_limits(self) -> StreamLimits:
        """Give what a stream of events needs to know."""
        return StreamLimits(
            keep_alive_seconds=self.limits.keep_alive_seconds,
            reader_seconds=self.limits.reader_seconds,
        )

    async def acquire(self, model: str) -> Model:
        """Pin what a model id means."""
        try:
            return await asyncio.to_thread(self.catalogue.acquire, model)
        except ShardbError as error:
            raise of_store(error, model) from error

    def progress(self) -> str:
        """Say what goes on, for a client that waits."""
        now = self.scheduler.statistics()
        return f"sweep {now.sweeps}, {now.requests_running} running, {now.requests_waiting} waiting"


class Answering:
    """One request while it is answered."""

    def __init__(self, service: Service, answers: int) -> None:
        """Count the answers in.

        Raises:
            ApiError: there is no room, or the server is stopping.
        """
        if service.is_stopping:
            raise stopping()
        self._service = service
        self._ticket: Ticket | None = service.admission.enter(answers)
        self._models: list[Model] = []
        self._generations: list[Generation] = []

    async def model(self, name: str) -> Model:
        """Pin a model until the request has ended."""
        model = await self._service.acquire(name)
        if self._ticket is None:  # the client left while this was in a thread
            model.release()
            raise stopping()
        self._models.append(model)
        return model

    def generate(self, model: Model, plans: Sequence[Plan], wanted: Wanted) -> Generation:
        """Submit plans."""
        generation = Generation(
            self._service.scheduler,
            model,
            plans,
            wanted,
            timeout_seconds=self._service.limits.request_seconds,
        )
        self._generations.append(generation)
        return generation

    def close(self) -> None:
        """End everything; once is enough."""
        if self._ticket is None:
            return
        self._ticket.leave()
        self._ticket = None
        metrics = self._service.metrics
        for generation in self._generations:
            generation.close()
            metrics.prompt_tokens += generation.prompt_tokens
            metrics.completion_tokens += generation.completion_tokens
            if generation.first_token_seconds is not None:
                metrics.first_token.observe(generation.first_token_seconds)
        for model in self._models:
            model.release()


async def encode_prompt(model: Model, prompt: Prompt, *, parse_special: bool) -> list[int]:
    """Give a prompt's token ids; what a user typed stays text unless the request says otherwise."""
    if not isinstance(prompt, str):
        return list(prompt)
    if not prompt:
        raise ApiError(
            400,
            f"the prompt is empty: 0 tokens, where the model's window has {model.window}; give a"
            " text, or token ids",
            code="empty_prompt",
            param="prompt",
        )
    vocabulary = model.words.vocabulary

    def encode() -> list[int]:
        if parse_special:
            return vocabulary.encode_marked(prompt)
        return vocabulary.encode_text(prompt, begin=True)

    return await in_thread_if_long(len(prompt), encode)


async def in_thread_if_long(characters: int, encode: Callable[[], T]) -> T:
    """Do the work of a text where it does not hold others up."""
    if characters < LONG_TEXT_CHARACTERS:
        return encode()
    return await asyncio.to_thread(encode)


def answer_tokens(
    model: Model, prompt_ids: Sequence[int], wanted: int | None, limits: Limits, *, where: str
) -> int:
    """Give how many tokens an answer may have.

    Raises:
        ApiError: prompt and answer do not fit the model's window together; with both counts.
    """
    count, window = len(prompt_ids), model.window
    if not count:
        raise ApiError(
            400,
            f"the prompt is empty: 0 tokens, where the model's window has {window}",
            code="empty_prompt",
            param=where,
        )
    vocab_size = model.pinned.config.vocab_size
    if max(prompt_ids) >= vocab_size:
        raise ApiError(
            400,
            f"token id {max(prompt_ids)} is outside the model's vocabulary of {vocab_size}",
            code="invalid_value",
            param=where,
        )
    if limits.max_tokens and wanted is not None and wanted > limits.max_tokens:
        raise ApiError(
            400,
            f"max_tokens is {wanted}; this server makes at most {limits.max_tokens}",
            code="invalid_value",
            param="max_tokens",
        )
    asked = 1 if wanted is None else wanted
    if count + asked > window:
        raise ApiError(
            400,
            f"This model's maximum context length is {window} tokens. However, you requested"
            f" {count + asked} tokens ({count} in the {where}, {asked} in the completion). Please"
            f" reduce the length of the {where} or completion.",
            code="context_length_exceeded",
            param=where,
        )
    if wanted is not None:
        return wanted
    return min(window - count, limits.max_tokens or window)


def check_biases(wanted: Wanted, vocab_size: int) -> None:
    """Refuse a bias for a token that the model does not have: it is meant for another model."""
    for token in wanted.sampling["logit_bias"]:
        if token >= vocab_size:
            raise bad_value(
                "logit_bias", f"token id {token} is outside the model's vocabulary of {vocab_size}"
            )


def stop_strings(wanted: Wanted, more: Sequence[str] = ()) -> tuple[str, ...]:
    """Give the stop strings of a request and of its chat format."""
    return (*wanted.stops, *(stop for stop in more if stop not in wanted.stops))
