"""Log-probabilities in the two shapes of the OpenAI API.

Owns how a token is written. Knows nothing of streams. Invariants: every number is finite (-9999.0
stands for minus infinity, as the API has it); a token whose bytes are not a whole text is written
as `bytes:\\xe2\\x80`, so that no two tokens share a key.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from serve.choice import SaidToken
from serve.requests import PromptLogprobs, TopLogprobs
from serve.vocabulary import Vocabulary

LOWEST = -9999.0


def finite(logprob: float) -> float:
    """Give a number that JSON can hold."""
    return max(logprob, LOWEST) if not math.isnan(logprob) else LOWEST


def token_text(vocabulary: Vocabulary, token: int) -> str:
    """Give a token as text."""
    data = vocabulary.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(
    vocabulary: Vocabulary, tokens: Iterable[SaidToken], count: int
) -> dict[str, Any]:
    """Give the `logprobs` of a chat's choice."""
    content = [
        {
            **_chat_token(vocabulary, said.event.token_id, said.event.logprob),
            "top_logprobs": [
                _chat_token(vocabulary, token, logprob) for token, logprob in said.event.top[:count]
            ],
        }
        for said in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    vocabulary: Vocabulary, tokens: Sequence[SaidToken], count: int, *, offset: int = 0
) -> dict[str, Any]:
    """Give the `logprobs` of a completion's choice; `offset` is where the answer begins."""
    return {
        "tokens": [token_text(vocabulary, said.event.token_id) for said in tokens],
        "token_logprobs": [finite(said.event.logprob) for said in tokens],
        "top_logprobs": [
            _with_itself(vocabulary, said.event.token_id, said.event.logprob, said.event.top, count)
            for said in tokens
        ],
        "text_offset": [offset + said.start for said in tokens],
    }


def prompt_logprobs(
    vocabulary: Vocabulary, prompt: PromptLogprobs, starts: Sequence[int], count: int
) -> dict[str, Any]:
    """Give the `logprobs` of a prompt that is echoed; its first token has none."""
    rows = list(zip(prompt.token_ids, prompt.logprobs, prompt.top, strict=True))
    return {
        "tokens": [token_text(vocabulary, token) for token, _, _ in rows],
        "token_logprobs": [None if p is None else finite(p) for _, p, _ in rows],
        "top_logprobs": [
            None if p is None else _with_itself(vocabulary, token, p, top, count)
            for token, p, top in rows
        ],
        "text_offset": list(starts),
    }


def joined(first: dict[str, Any] | None, second: dict[str, Any]) -> dict[str, Any]:
    """Give the log-probabilities of a prompt and its answer as one."""
    return second if first is None else {name: first[name] + second[name] for name in second}


def _with_itself(
    vocabulary: Vocabulary, token: int, logprob: float, top: TopLogprobs, count: int
) -> dict[str, float]:
    """Give the alternatives, and the token itself where it is not among them."""
    found = {token_text(vocabulary, other): finite(p) for other, p in top[:count]}
    if count:
        found.setdefault(token_text(vocabulary, token), finite(logprob))
    return found


def _chat_token(vocabulary: Vocabulary, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_text(vocabulary, token),
        "logprob": finite(logprob),
        "bytes": list(vocabulary.token_bytes(token)),
    }
