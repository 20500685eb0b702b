"""The server's own routes that make text: /generate, and /compare for two commits side by side.

Owns their answers. Knows nothing of sockets.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.responses import Response

from serve.catalogue import Model
from serve.compare import Side, comparison
from serve.generation import Generation
from serve.incoming import Incoming
from serve.logprob_answers import completion_logprobs
from serve.native_requests import read_compare, read_generate
from serve.openai_answers import Gathered, gather, usage
from serve.openai_requests import Prompt
from serve.routes_openai import plans_for, stream
from serve.sampling_fields import Wanted
from serve.service import Answering, Service, encode_prompt
from serve.sse import Json, unless_client_leaves


async def generate(service: Service, incoming: Incoming) -> Response:
    """Answer POST /generate."""
    request = read_generate(await incoming.json())
    answering = Answering(service, 1)
    try:
        model = await answering.model(request.wanted.model)
        generation = await _begin(service, answering, model, request.prompt, request.wanted)
        if request.wanted.stream:
            return stream(service, answering, _events(generation))
        found = await unless_client_leaves(incoming.receive, gather(generation))
        body = _body(generation, request.wanted, found[0])
    except BaseException:
        answering.close()
        raise
    answering.close()
    return Json(body)


async def compare(service: Service, incoming: Incoming) -> Response:
    """Answer POST /compare: both commits move through the same sweeps."""
    request = read_compare(await incoming.json())
    answering = Answering(service, 2)
    try:
        models = [await answering.model(wanted.model) for wanted in request.wanted]
        generations = [
            await _begin(service, answering, model, request.prompt, wanted)
            for model, wanted in zip(models, request.wanted, strict=True)
        ]
        work = asyncio.gather(*(gather(generation) for generation in generations))
        found = await unless_client_leaves(incoming.receive, work)
        sides = [
            Side(generation=generation, found=gathered[0])
            for generation, gathered in zip(generations, found, strict=True)
        ]
        return Json(comparison(sides[0], sides[1]))
    finally:
        answering.close()


async def _begin(
    service: Service, answering: Answering, model: Model, prompt: Prompt, wanted: Wanted
) -> Generation:
    ids = await encode_prompt(model, prompt, parse_special=wanted.parse_special)
    plans = plans_for(service, model, ids, wanted, where="prompt", count=1)
    return answering.generate(model, plans, wanted)


async def _events(generation: Generation) -> AsyncIterator[Mapping[str, Any]]:
    """Give pieces of text; the last event says how it ended and for which commit."""
    finish: str | None = None
    async for piece in generation.pieces():
        finish = piece.finish or finish
        if piece.text:
            yield {"text": piece.text}
    yield {"text": "", "finish_reason": finish, **_head(generation), "usage": usage(generation)}


def _body(generation: Generation, wanted: Wanted, found: Gathered) -> dict[str, Any]:
    body = {
        **_head(generation),
        "text": found.text,
        "finish_reason": found.finish,
        "stop_reason": found.ended_by,
        "usage": usage(generation),
        "seconds": round(time.monotonic() - generation.began, 6),
    }
    if wanted.logprobs is not None:
        vocabulary = generation.model.words.vocabulary
        body["logprobs"] = completion_logprobs(vocabulary, found.tokens, wanted.logprobs)
    return body


def _head(generation: Generation) -> dict[str, Any]:
    commit = generation.model.pinned.commit
    return {
        "id": f"gen-{uuid.uuid4().hex}",
        "model": generation.model.id,
        "commit": commit.id,
        "step": commit.step,
    }
