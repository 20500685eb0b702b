"""What is asked of the scheduler and what it answers: parameters in, events out.

Owns the words between the HTTP side and the scheduler. Knows nothing of text, HTTP, stores or
tensors: everything is token ids. Invariants: parameters that exist can be sampled with; the last
event of a request is its one `Finished`; `PromptLogprobs`, when asked for, comes before the first
`TokenEvent`; a stop token is told by `Finished` and has no event of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardb.errors import ShardbError, UsageError

Reason = Literal["stop", "length", "cancelled", "error"]
TopLogprobs = tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParameters:
    """How a request's tokens are chosen.

    `temperature` or `top_p` 0 takes the most likely token. `top_k` 0 and `min_p` 0 leave all
    tokens. `logit_bias` is added to logits before anything else; `repetition_penalty` counts prompt
    and answer, the other two penalties the answer alone. Without `seed` every request draws one.
    `top_logprobs` asks for that many likely alternatives an event; log-probabilities are always
    those of the model's own distribution, before bias, penalties and temperature. `stop_token_ids`
    end the answer, and so does the model's end token unless `ignore_eos`. Ids at or above
    `vocab_size`, which the tokenizer has no word for, do not exist.

    Raises:
        UsageError: a value cannot be used; the message names the field.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: bool = False
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 0, "max_tokens", self.max_tokens, "0 or more")
        _require(0 <= self.temperature < math.inf, "temperature", self.temperature, "0 or more")
        _require(0 <= self.top_p <= 1, "top_p", self.top_p, "0 to 1")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (all tokens) or more")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "0 to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(math.isfinite(value), name, value, "a finite number")
        _require(
            0 < self.repetition_penalty < math.inf,
            "repetition_penalty",
            self.repetition_penalty,
            "more than 0",
        )
        for token, bias in self.logit_bias.items():
            _require(token >= 0, "logit_bias", token, "token ids of 0 or more")
            _require(not math.isnan(bias), "logit_bias", bias, "numbers")
        count = self.top_logprobs
        _require(count is None or count >= 0, "top_logprobs", count, "0 or more")
        size = self.vocab_size
        _require(size is None or size >= 1, "vocab_size", size, "1 or more")

    @property
    def is_greedy(self) -> bool:
        """Say whether the most likely token is taken: below 1e-5 the division would overflow."""
        return self.temperature < 1e-5 or self.top_p == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt's own tokens; the first one has none.

    `logprobs` and `top` have one entry a prompt token; `top` is empty unless `top_logprobs` asked.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    top: tuple[TopLogprobs, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEvent:
    """One token of the answer, with the likeliest alternatives (most likely first)."""

    token_id: int
    logprob: float
    top: TopLogprobs = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The end: why, and which stop token if one was met.

    `cached_tokens` are prompt tokens whose keys and values were there from an earlier request.
    """

    reason: Reason
    error: ShardbError | None = None
    stop_token_id: int | None = None
    cached_tokens: int = 0


Event = PromptLogprobs | TokenEvent | Finished
Sink = Callable[[Event], None]


def _require(holds: bool, field_name: str, value: object, remedy: str) -> None:
    if not holds:
        raise UsageError(f"{field_name} is {value}: give {remedy}")
