"""The bodies of /generate and /compare.

Owns their fields, which are those of `train-generate` and of the OpenAI API by the same names.
Knows nothing of how they are answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from serve.errors import bad_value
from serve.openai_requests import Prompt, read_prompts
from serve.request_fields import Fields
from serve.sampling_fields import (
    LOGPROBS_MAX,
    TOKENS_MAX,
    Wanted,
    read_sampling,
    read_seed,
    read_stops,
)

DEFAULT_NEW_TOKENS = 128
DEFAULT_MODEL = "primary"
DEFAULT_MODELS = ("primary", "backup")


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """A checked body of /generate."""

    wanted: Wanted
    prompt: Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareRequest:
    """A checked body of /compare: the same request to two models."""

    wanted: tuple[Wanted, Wanted]
    prompt: Prompt


def read_generate(body: Mapping[str, Any]) -> GenerateRequest:
    """Check a body of /generate."""
    fields = Fields(body)
    wanted = _wanted(fields, fields.text("model") or DEFAULT_MODEL, stream=fields.flag("stream"))
    prompt = _prompt(fields)
    fields.close()
    return GenerateRequest(wanted=wanted, prompt=prompt)


def read_compare(body: Mapping[str, Any]) -> CompareRequest:
    """Check a body of /compare; without temperature the most likely tokens are compared."""
    fields = Fields({"temperature": 0, **body})
    models = fields.value("models")
    if models is None:
        models = list(DEFAULT_MODELS)
    is_pair = isinstance(models, list) and len(models) == 2
    if not is_pair or not all(isinstance(model, str) for model in models):
        raise bad_value("models", "give a list of two model ids")
    first = _wanted(fields, models[0], stream=False)
    first = replace(first, logprobs=max(first.logprobs or 0, 5))
    prompt = _prompt(fields)
    fields.close()
    return CompareRequest(wanted=(first, replace(first, model=models[1])), prompt=prompt)


def _wanted(fields: Fields, model: str, *, stream: bool) -> Wanted:
    limits = [
        fields.integer(name, None, low=1, high=TOKENS_MAX)
        for name in ("max_new_tokens", "max_tokens")
    ]
    given = [limit for limit in limits if limit is not None]
    return Wanted(
        model=model,
        max_tokens=min(given, default=DEFAULT_NEW_TOKENS),
        sampling=read_sampling(fields),
        seed=read_seed(fields),
        stops=read_stops(fields),
        include_stop=fields.flag("include_stop_str_in_output"),
        skip_special=fields.flag("skip_special_tokens", True),
        parse_special=fields.flag("parse_special_tokens"),
        logprobs=fields.integer("logprobs", None, low=0, high=LOGPROBS_MAX),
        stream=stream,
    )


def _prompt(fields: Fields) -> Prompt:
    prompts = read_prompts(fields)
    if len(prompts) != 1:
        raise bad_value("prompt", "give one prompt")
    return prompts[0]
