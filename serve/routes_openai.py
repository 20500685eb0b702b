"""The routes of the OpenAI API: completions, chats, models.

Owns the way from a checked body to plans. Knows nothing of sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from starlette.responses import Response

from serve.catalogue import Catalogue, Model
from serve.errors import of_store
from serve.generation import Plan
from serve.incoming import Incoming
from serve.openai_answers import ChatAnswers, CompletionAnswers
from serve.openai_requests import Prompt, read_chat, read_completion
from serve.sampling_fields import Wanted
from serve.service import (
    Answering,
    Service,
    answer_tokens,
    check_biases,
    encode_prompt,
    in_thread_if_long,
    stop_strings,
)
from serve.sse import EventStream, Json, unless_client_leaves
from shardb.errors import ShardbError
from shardb.records import Commit

OWNER = "shardb"


async def completions(service: Service, incoming: Incoming) -> Response:
    """Answer POST /v1/completions."""
    request = read_completion(await incoming.json())
    wanted = request.wanted
    answering = Answering(service, len(request.prompts) * wanted.best_of)
    try:
        model = await answering.model(wanted.model)
        plans: list[Plan] = []
        for prompt in request.prompts:
            plans += await _completion_plans(service, model, prompt, wanted)
        generation = answering.generate(model, plans, wanted)
        return await _respond(service, incoming, answering, CompletionAnswers(generation, wanted))
    except BaseException:
        answering.close()
        raise


async def chat_completions(service: Service, incoming: Incoming) -> Response:
    """Answer POST /v1/chat/completions."""
    request = read_chat(await incoming.json())
    wanted = request.wanted
    answering = Answering(service, wanted.n)
    try:
        model = await answering.model(wanted.model)
        prompt = await in_thread_if_long(
            sum(len(message["content"]) for message in request.messages),
            lambda: model.words.chat.prompt(
                request.messages,
                model.words.vocabulary,
                add_generation_prompt=request.add_generation_prompt,
            ),
        )
        plans = plans_for(
            service, model, prompt.ids, wanted, stops=prompt.stops, where="messages", count=wanted.n
        )
        generation = answering.generate(model, plans, wanted)
        return await _respond(service, incoming, answering, ChatAnswers(generation, wanted))
    except BaseException:
        answering.close()
        raise


async def models(service: Service, incoming: Incoming) -> Response:
    """Answer GET /v1/models: the roles, then every branch and snapshot."""
    del incoming
    rows = await asyncio.to_thread(_model_rows, service.catalogue)
    return Json({"object": "list", "data": rows})


async def model(service: Service, incoming: Incoming) -> Response:
    """Answer GET /v1/models/ID for whatever can be asked of, listed or not."""
    found = await service.acquire(incoming.rest)
    try:
        return Json(model_row(found.id, found.store, found.pinned.commit, found.window))
    finally:
        found.release()


def plans_for(
    service: Service,
    model: Model,
    prompt_ids: Sequence[int],
    wanted: Wanted,
    *,
    stops: Sequence[str] = (),
    where: str,
    count: int,
    text: str | None = None,
) -> list[Plan]:
    """Plan `count` answers to one prompt."""
    check_biases(wanted, model.pinned.config.vocab_size)
    tokens = answer_tokens(model, prompt_ids, wanted.max_tokens, service.limits, where=where)
    words = model.words
    return [
        Plan(
            prompt_ids=prompt_ids,
            parameters=wanted.parameters(
                index, tokens, vocab_size=words.vocabulary.size, ends=words.stop_ids
            ),
            stops=stop_strings(wanted, stops),
            text=text,
        )
        for index in range(count)
    ]


async def _completion_plans(
    service: Service, model: Model, prompt: Prompt, wanted: Wanted
) -> list[Plan]:
    ids = await encode_prompt(model, prompt, parse_special=wanted.parse_special)
    text = prompt if isinstance(prompt, str) else None
    return plans_for(service, model, ids, wanted, where="prompt", count=wanted.best_of, text=text)


async def _respond(
    service: Service,
    incoming: Incoming,
    answering: Answering,
    answers: ChatAnswers | CompletionAnswers,
) -> Response:
    """Answer whole, or begin a stream that closes the answering at its end."""
    if answers.wanted.stream:
        return stream(service, answering, answers.events())
    try:
        return Json(await unless_client_leaves(incoming.receive, answers.whole()))
    finally:
        answering.close()


def stream(
    service: Service, answering: Answering, events: AsyncIterator[Mapping[str, Any]]
) -> EventStream:
    """Give a stream that ends an answering when it ends."""
    return EventStream(
        events,
        service.stream_limits,
        headers={},
        comment=service.progress,
        on_end=answering.close,
    )


def model_row(name: str, store: str, commit: Commit, window: int | None = None) -> dict[str, Any]:
    """Describe a model as the API does, with what a store knows of it."""
    row = {
        "id": name,
        "object": "model",
        "created": int(commit.time),
        "owned_by": OWNER,
        "root": store,
        "commit": commit.id,
        "step": commit.step,
        "branch": commit.branch,
    }
    return row if window is None else {**row, "max_model_len": window}


def _model_rows(catalogue: Catalogue) -> list[dict[str, Any]]:
    rows = []
    for store in catalogue.stores:
        try:
            pinned = store.current()
        except ShardbError as error:
            raise of_store(error, store.role) from error
        window = pinned.config.max_position_embeddings
        rows.append(model_row(store.role, store.name, pinned.commit, window))
        pinned.release()
    refs = catalogue.refs()
    return rows + [model_row(f"{s.role}@{ref}", s.name, commit) for s, ref, commit in refs]
