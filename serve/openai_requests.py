"""The bodies of /v1/completions and /v1/chat/completions.

Owns the fields of the OpenAI API and which of them this server honours, ignores or refuses. Knows
nothing of how they are answered. Ignored are fields that change nothing a client can see here, such
as `user`; refused are those whose silent absence would change the answer, such as `tools`.
Source: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve.errors import ApiError, bad_value
from serve.request_fields import Fields
from serve.sampling_fields import (
    CHOICES_MAX,
    LOGPROBS_MAX,
    TOKENS_MAX,
    Wanted,
    read_shared,
)
from serve.vocabulary import check_text

PROMPTS_MAX = 128
MESSAGES_MAX = 4096
ROLES = ("system", "developer", "user", "assistant", "tool")
DEFAULT_COMPLETION_TOKENS = 16
IGNORED = (
    *("user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier"),
    *("prompt_cache_retention", "verbosity", "reasoning_effort"),
)
REFUSED: Mapping[str, Any] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "parallel_tool_calls": (True, False),
}
Prompt = str | tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRequest:
    """A checked body of /v1/completions."""

    wanted: Wanted
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """A checked body of /v1/chat/completions."""

    wanted: Wanted
    messages: tuple[Mapping[str, Any], ...]
    add_generation_prompt: bool = True


def read_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """Check a completion's body."""
    fields = Fields(body)
    shared = read_shared(fields)
    prompts = read_prompts(fields)
    best_of = fields.count("best_of", shared["n"], low=1, high=CHOICES_MAX)
    if best_of < shared["n"]:
        raise bad_value("best_of", f"{best_of} is less than 'n', {shared['n']}")
    if best_of > shared["n"] and shared["stream"]:
        raise bad_value("best_of", "the best answers are known at the end: do not stream")
    if len(prompts) * best_of > CHOICES_MAX:
        raise bad_value("n", f"more than {CHOICES_MAX} answers in one request")
    wanted = Wanted(
        max_tokens=fields.integer("max_tokens", DEFAULT_COMPLETION_TOKENS, low=0, high=TOKENS_MAX),
        logprobs=_completion_logprobs(fields),
        echo=fields.flag("echo"),
        parse_special=fields.flag("parse_special_tokens"),
        best_of=best_of,
        **shared,
    )
    if wanted.max_tokens == 0 and not wanted.echo:
        raise bad_value("max_tokens", "0 needs 'echo': there would be nothing to answer")
    fields.refuse({"suffix": ("",)})
    fields.ignore(*IGNORED)
    fields.close()
    return CompletionRequest(wanted=wanted, prompts=prompts)


def read_chat(body: Mapping[str, Any]) -> ChatRequest:
    """Check a chat's body."""
    fields = Fields(body)
    shared = read_shared(fields)
    limits = [
        fields.integer(name, None, low=1, high=TOKENS_MAX)
        for name in ("max_completion_tokens", "max_tokens")
    ]
    given = [limit for limit in limits if limit is not None]
    wanted = Wanted(
        max_tokens=min(given, default=None),
        logprobs=_chat_logprobs(fields),
        best_of=shared["n"],
        **shared,
    )
    messages = _messages(fields)
    add_generation_prompt = fields.flag("add_generation_prompt", True)
    fields.refuse(REFUSED)
    fields.ignore(*IGNORED)
    fields.close()
    return ChatRequest(
        wanted=wanted, messages=messages, add_generation_prompt=add_generation_prompt
    )


def read_prompts(fields: Fields) -> tuple[Prompt, ...]:
    """Read one prompt or many, each a text or a list of token ids."""
    value = fields.value("prompt")
    if value is None:
        fields.text("prompt", needed=True)
    if isinstance(value, str):
        return (check_text(value, "prompt"),)
    if not isinstance(value, list):
        raise bad_value("prompt", "give a text, token ids, or a list of them", code="invalid_type")
    if not value:
        raise bad_value("prompt", "the list is empty: give at least one prompt")
    if all(type(item) is int for item in value):
        return (_token_ids(value),)
    if len(value) > PROMPTS_MAX:
        raise bad_value("prompt", f"{len(value)} prompts: give at most {PROMPTS_MAX}")
    return tuple(_one_prompt(item) for item in value)


def _one_prompt(item: Any) -> Prompt:
    if isinstance(item, str):
        return check_text(item, "prompt")
    if isinstance(item, list) and all(type(token) is int for token in item):
        return _token_ids(item)
    raise bad_value("prompt", "each prompt is a text or a list of token ids", code="invalid_type")


def _token_ids(item: list[int]) -> tuple[int, ...]:
    if any(token < 0 or token >= 1 << 31 for token in item):
        raise bad_value("prompt", "a token id is negative or too large")
    return tuple(item)


def _completion_logprobs(fields: Fields) -> int | None:
    if isinstance(fields.value("logprobs"), bool):
        raise bad_value("logprobs", "here this is a number of alternatives", code="invalid_type")
    return fields.integer("logprobs", None, low=0, high=LOGPROBS_MAX)


def _chat_logprobs(fields: Fields) -> int | None:
    is_wanted = fields.flag("logprobs")
    count = fields.integer("top_logprobs", None, low=0, high=LOGPROBS_MAX)
    if count is not None and not is_wanted:
        raise bad_value("top_logprobs", "needs 'logprobs' to be true")
    return (count or 0) if is_wanted else None


def _messages(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    value = fields.value("messages")
    if value is None:
        raise ApiError(
            400,
            "you must provide 'messages'",
            code="missing_required_parameter",
            param="messages",
        )
    if not isinstance(value, list):
        raise bad_value("messages", "give a list", code="invalid_type")
    if not 0 < len(value) <= MESSAGES_MAX:
        raise bad_value("messages", f"give 1 to {MESSAGES_MAX} messages, not {len(value)}")
    return tuple(_message(item, f"messages[{index}]") for index, item in enumerate(value))


def _message(item: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(item, dict):
        raise bad_value(where, "give an object with 'role' and 'content'", code="invalid_type")
    inner = Fields(item, within=where)
    role = inner.text("role", needed=True)
    if role not in ROLES:
        raise bad_value(f"{where}.role", f"give one of {', '.join(ROLES)}")
    message: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": _content(inner, role),
    }
    for name in ("name", "tool_call_id"):
        if inner.has(name):
            message[name] = inner.text(name)
    inner.refuse({"tool_calls": ([],), "function_call": (), "audio": ()})
    inner.ignore("refusal", "annotations", "reasoning_content", "reasoning")
    inner.close()
    return message


def _content(inner: Fields, role: str) -> str:
    value = inner.value("content")
    if isinstance(value, list):
        return "".join(
            _part(part, f"{inner.path('content')}[{index}]") for index, part in enumerate(value)
        )
    return inner.text("content", needed=role != "assistant")


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise bad_value(where, "give an object with a 'type'", code="invalid_type")
    fields = Fields(part, within=where)
    kind = fields.text("type", needed=True)
    if kind == "refusal":
        return fields.text("refusal", needed=True)
    if kind != "text":
        raise ApiError(
            400,
            f"'{where}.type': this model reads text only, not {kind[:40]!r}",
            code="unsupported_content",
            param=f"{where}.type",
        )
    return fields.text("text", needed=True)
