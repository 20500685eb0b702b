"""How a body says that tokens are chosen and where a text ends.

Owns the names, bounds and defaults that all endpoints share. Knows nothing of prompts. Seeds: a
request without one draws one, so that two equal requests differ; choice `k` of a request with
seed `s` uses `s + k`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve.errors import bad_value
from serve.request_fields import Fields
from serve.requests import SamplingParameters
from serve.vocabulary import check_text

STOPS_MAX = 16
STOP_CHARACTERS_MAX = 1000
STOP_IDS_MAX = 256
BIASES_MAX = 1024
CHOICES_MAX = 128
TEMPERATURE_MAX = 2.0
LOGPROBS_MAX = 20
TOKENS_MAX = 1 << 31
SEED_BITS = 63


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What every kind of generation can ask for.

    max_tokens: None for the endpoint's default; sampling: keywords of `SamplingParameters`, which
    also needs `max_tokens`; logprobs: alternatives a token, None for no log-probabilities.
    """

    model: str
    max_tokens: int | None
    sampling: Mapping[str, Any]
    seed: int
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    parse_special: bool = False
    stream: bool = False
    include_usage: bool = False
    n: int = 1
    best_of: int = 1
    logprobs: int | None = None
    echo: bool = False

    def parameters(
        self, choice: int, max_tokens: int, *, vocab_size: int, ends: frozenset[int]
    ) -> SamplingParameters:
        """Give the parameters of one choice; `ends` are ids that end an answer of the model."""
        sampling = dict(self.sampling)
        if not sampling["ignore_eos"]:
            sampling["stop_token_ids"] |= ends
        return SamplingParameters(
            max_tokens=max_tokens,
            seed=(self.seed + choice) % (1 << SEED_BITS),
            top_logprobs=self.logprobs,
            prompt_logprobs=self.echo and self.logprobs is not None,
            vocab_size=vocab_size,
            **sampling,
        )


def read_sampling(fields: Fields) -> dict[str, Any]:
    """Read the numbers that choose tokens."""
    top_k = fields.count("top_k", 0, low=-1)
    return {
        "temperature": fields.number("temperature", 1.0, low=0.0, high=TEMPERATURE_MAX),
        "top_p": fields.number("top_p", 1.0, low=0.0, high=1.0),
        "top_k": max(0, top_k),
        "min_p": fields.number("min_p", 0.0, low=0.0, high=1.0),
        "presence_penalty": fields.number("presence_penalty", 0.0, low=-2.0, high=2.0),
        "frequency_penalty": fields.number("frequency_penalty", 0.0, low=-2.0, high=2.0),
        "repetition_penalty": fields.number("repetition_penalty", 1.0, low=0.01, high=10.0),
        "logit_bias": _logit_bias(fields),
        "stop_token_ids": _stop_ids(fields),
        "ignore_eos": fields.flag("ignore_eos"),
    }


def read_seed(fields: Fields) -> int:
    """Read the seed, or draw one."""
    seed = fields.integer("seed", None, low=-(1 << SEED_BITS), high=(1 << SEED_BITS) - 1)
    if seed is None:
        return int.from_bytes(os.urandom(7))
    return seed % (1 << SEED_BITS)


def read_stops(fields: Fields) -> tuple[str, ...]:
    """Read the stop strings: one text or a few."""
    value = fields.value("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise bad_value("stop", "give a text or a list of texts", code="invalid_type")
    if len(stops) > STOPS_MAX:
        raise bad_value("stop", f"{len(stops)} stop strings: give at most {STOPS_MAX}")
    for stop in stops:
        if not 0 < len(stop) <= STOP_CHARACTERS_MAX:
            raise bad_value(
                "stop", f"a stop string has 1 to {STOP_CHARACTERS_MAX} characters, not {len(stop)}"
            )
        check_text(stop, "stop")
    return tuple(stops)


def read_streaming(fields: Fields) -> tuple[bool, bool]:
    """Read whether to stream, and whether the stream ends with the usage."""
    stream = fields.flag("stream")
    if fields.has("stream_options") and not stream:
        raise bad_value("stream_options", "only allowed when 'stream' is true")
    options = fields.inner("stream_options")
    include_usage = options.flag("include_usage")
    options.ignore("include_obfuscation")
    options.close()
    return stream, include_usage


def read_shared(fields: Fields) -> dict[str, Any]:
    """Read what completions and chats have alike: keywords of `Wanted`."""
    stream, include_usage = read_streaming(fields)
    return {
        "model": fields.text("model", needed=True),
        "sampling": read_sampling(fields),
        "seed": read_seed(fields),
        "stops": read_stops(fields),
        "include_stop": fields.flag("include_stop_str_in_output"),
        "skip_special": fields.flag("skip_special_tokens", True),
        "stream": stream,
        "include_usage": include_usage,
        "n": fields.count("n", 1, low=1, high=CHOICES_MAX),
    }


def _logit_bias(fields: Fields) -> dict[int, float]:
    value = fields.value("logit_bias")
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > BIASES_MAX:
        raise bad_value(
            "logit_bias", f"give an object of at most {BIASES_MAX} token ids and numbers"
        )
    inner = Fields(value, within="logit_bias")
    found = {}
    for key in value:
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise bad_value("logit_bias", 'keys are token ids, such as "1234"')
        found[int(key)] = inner.number(key, 0.0, low=-100.0, high=100.0)
    return found


def _stop_ids(fields: Fields) -> frozenset[int]:
    value = fields.value("stop_token_ids")
    if value is None:
        return frozenset()
    is_list = isinstance(value, list) and len(value) <= STOP_IDS_MAX
    if not is_list or not all(type(token) is int and token >= 0 for token in value):
        raise bad_value("stop_token_ids", f"give a list of at most {STOP_IDS_MAX} token ids")
    return frozenset(value)
