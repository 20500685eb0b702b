"""Is every field of a body checked, and every refusal one that a client can act on?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from serve.errors import ApiError
from serve.native_requests import read_compare, read_generate
from serve.openai_requests import read_chat, read_completion
from serve.request_fields import parse_body

PROMPT = {"model": "m", "prompt": "hi"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
BAD_SHARED: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": 2.5}, "temperature", "invalid_value"),
    ({"temperature": "hot"}, "temperature", "invalid_type"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"temperature": -0.1}, "temperature", "invalid_value"),
    ({"top_p": 1.1}, "top_p", "invalid_value"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"top_k": 1.5}, "top_k", "invalid_type"),
    ({"min_p": 2}, "min_p", "invalid_value"),
    ({"presence_penalty": 3}, "presence_penalty", "invalid_value"),
    ({"frequency_penalty": -3}, "frequency_penalty", "invalid_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "invalid_value"),
    ({"logit_bias": [1]}, "logit_bias", "invalid_value"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": [1]}, "stop", "invalid_type"),
    ({"stop": ["a"] * 17}, "stop", "invalid_value"),
    ({"stop": "\ud800"}, "stop", "invalid_value"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 129}, "n", "invalid_value"),
    ({"seed": 1 << 64}, "seed", "invalid_value"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": 1}, "stream_options", "invalid_type"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
    ({"temprature": 1}, "temprature", "unknown_parameter"),
    ({"model": None}, "model", "missing_required_parameter"),
    ({"model": 5}, "model", "invalid_type"),
]
BAD_COMPLETION: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "missing_required_parameter"),
    ({"prompt": []}, "prompt", "invalid_value"),
    ({"prompt": 5}, "prompt", "invalid_type"),
    ({"prompt": [1, "a"]}, "prompt", "invalid_type"),
    ({"prompt": [True]}, "prompt", "invalid_type"),
    ({"prompt": [-1]}, "prompt", "invalid_value"),
    ({"prompt": ["a"] * 129}, "prompt", "invalid_value"),
    ({"prompt": "\udc00"}, "prompt", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": -1, "echo": True}, "max_tokens", "invalid_value"),
    ({"logprobs": True}, "logprobs", "invalid_type"),
    ({"logprobs": 21}, "logprobs", "invalid_value"),
    ({"best_of": 1, "n": 2}, "best_of", "invalid_value"),
    ({"best_of": 2, "stream": True}, "best_of", "invalid_value"),
    ({"prompt": ["a"] * 100, "n": 2}, "n", "invalid_value"),
    ({"suffix": "end"}, "suffix", "unsupported_parameter"),
]
BAD_CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "messages", "missing_required_parameter"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"messages": ["hi"]}, "messages[0]", "invalid_type"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role", "missing_required_parameter"),
    ({"messages": [{"role": "king", "content": ""}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content", "invalid_type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
        "unsupported_content",
    ),
    (
        {"messages": [{"role": "user", "content": "a", "x": 1}]},
        "messages[0].x",
        "unknown_parameter",
    ),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
]


def refusal(read: Any, body: Mapping[str, Any]) -> tuple[int, str | None, str]:
    with pytest.raises(ApiError) as caught:
        read(body)
    error = caught.value
    assert error.body()["error"]["type"] == "invalid_request_error"
    assert error.message
    return error.status, error.param, error.code


@pytest.mark.parametrize(("change", "param", "code"), BAD_SHARED)
def test_are_shared_fields_checked(change: dict[str, Any], param: str, code: str) -> None:
    assert refusal(read_completion, {**PROMPT, **change}) == (400, param, code)
    assert refusal(read_chat, {**CHAT, **change}) == (400, param, code)


@pytest.mark.parametrize(("change", "param", "code"), BAD_COMPLETION)
def test_are_completions_checked(change: dict[str, Any], param: str, code: str) -> None:
    assert refusal(read_completion, {**PROMPT, **change}) == (400, param, code)


@pytest.mark.parametrize(("change", "param", "code"), BAD_CHAT)
def test_are_chats_checked(change: dict[str, Any], param: str, code: str) -> None:
    assert refusal(read_chat, {**CHAT, **change}) == (400, param, code)


def test_is_a_whole_completion_read() -> None:
    body = {
        "prompt": ["a", [1, 2]],
        "max_tokens": 5,
        "temperature": 0,
        "top_p": 0,
        "top_k": -1,
        "n": 2,
        "best_of": 3,
        "logprobs": 2,
        "echo": True,
        "stop": "x",
        "seed": -1,
        "logit_bias": {"7": -100},
        "stop_token_ids": [3],
        "ignore_eos": True,
        "user": "me",
    }
    request = read_completion({**PROMPT, **body})
    wanted = request.wanted
    assert request.prompts == ("a", (1, 2))
    assert (wanted.n, wanted.best_of, wanted.logprobs, wanted.echo) == (2, 3, 2, True)
    parameters = wanted.parameters(1, 5, vocab_size=9, ends=frozenset({4}))
    assert parameters.is_greedy
    assert parameters.logit_bias == {7: -100.0}
    assert parameters.stop_token_ids == {3}  # the model's own ends are ignored too
    assert parameters.seed == 0  # the largest seed, and one more
    assert parameters.prompt_logprobs


def test_are_nulls_what_they_are_in_the_api() -> None:
    nothing = dict.fromkeys(("max_tokens", "n", "stop", "seed", "logit_bias", "temperature"))
    assert read_completion({**PROMPT, **nothing}).wanted.max_tokens == 16
    assert read_chat({**CHAT, **nothing, "tools": []}).wanted.max_tokens is None


def test_do_two_requests_without_a_seed_differ() -> None:
    seeds = {read_completion(PROMPT).wanted.seed for _ in range(8)}
    assert len(seeds) == 8
    assert read_completion({**PROMPT, "seed": 5}).wanted.seed == 5


def test_are_messages_made_plain() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": parts},
        {"role": "assistant", "content": None, "refusal": None},
        {"role": "user", "content": "c", "name": "me"},
    ]
    request = read_chat({"model": "m", "messages": messages, "max_completion_tokens": 3})
    assert [dict(message) for message in request.messages] == [
        {"role": "system", "content": "ab"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "c", "name": "me"},
    ]
    assert request.wanted.max_tokens == 3


def test_are_the_native_bodies_read() -> None:
    found = read_generate({"prompt": "a", "max_new_tokens": 3, "logprobs": 1})
    assert (found.wanted.model, found.wanted.max_tokens, found.wanted.logprobs) == ("primary", 3, 1)
    pair = read_compare({"prompt": "a", "models": ["x", "y"], "max_tokens": 4})
    assert [wanted.model for wanted in pair.wanted] == ["x", "y"]
    assert pair.wanted[0].seed == pair.wanted[1].seed
    assert pair.wanted[0].sampling["temperature"] == 0
    assert refusal(read_compare, {"prompt": "a", "models": ["x"]})[1] == "models"
    assert refusal(read_generate, {"prompt": ["a", "b"]})[1] == "prompt"
    assert refusal(read_generate, {"prompt": "a", "path": "/etc"})[2] == "unknown_parameter"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'\xff\xfe\x00{"a":1}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100 + b"1" + b"}" * 100,
    ],
)
def test_is_what_is_no_json_object_refused(data: bytes) -> None:
    assert refusal(parse_body, data)[::2] == (400, "invalid_json")


def test_can_a_number_not_be_too_large_for_a_message() -> None:
    body = parse_body(b'{"model": "m", "prompt": "a", "temperature": 1e400}')
    assert refusal(read_completion, body) == (400, "temperature", "invalid_value")
