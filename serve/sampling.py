"""The next token of one request, from its logits alone.

Owns penalties, filters, the draw and log-probabilities. Knows nothing of other requests: the draw
is a pure function of the seed and of the token's place in the answer, so neither batch mates nor a
computation begun anew change it.

Shapes: V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serve.requests import SamplingParameters, TopLogprobs
from shardb.errors import ShardbError


class NonFiniteLogitsError(ShardbError):
    """A model's logits are not numbers: its training diverged; choose an earlier commit."""

    kind = "non_finite_logits"
    exit_code = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A token, its log-probability, and the likeliest alternatives."""

    token_id: int
    logprob: float
    top: TopLogprobs


def choose(
    logits_V: Tensor,
    parameters: SamplingParameters,
    *,
    prompt: Sequence[int],
    answer: Sequence[int],
    seed: int,
) -> Choice:
    """Choose the token after `prompt` and `answer` by fp32 logits [V] on the host."""
    logits_V = existing(logits_V, parameters)
    logprobs_V = torch.log_softmax(logits_V, dim=-1)
    adjusted_V = _adjusted(logits_V, parameters, prompt, answer)
    if parameters.is_greedy:
        token = int(adjusted_V.argmax())
    else:
        token = _draw(adjusted_V, parameters, uniform(seed, len(answer)))
    return Choice(
        token_id=token,
        logprob=float(logprobs_V[token]),
        top=likeliest(logprobs_V, parameters.top_logprobs),
    )


def existing(logits_V: Tensor, parameters: SamplingParameters) -> Tensor:
    """Give the logits of tokens that exist; NonFiniteLogitsError where they are not numbers."""
    found = logits_V if parameters.vocab_size is None else logits_V[: parameters.vocab_size]
    if not bool(torch.isfinite(found).all()):
        raise NonFiniteLogitsError(
            "the model's logits are not finite: its training diverged; choose an earlier commit"
        )
    return found


def likeliest(logprobs_V: Tensor, count: int | None) -> TopLogprobs:
    """Give the `count` likeliest tokens with their log-probabilities, most likely first."""
    if not count:
        return ()
    values, ids = torch.topk(logprobs_V, min(count, logprobs_V.shape[0]))
    return tuple(zip(ids.tolist(), values.tolist(), strict=True))


def uniform(seed: int, place: int) -> float:
    """Give the number in [0, 1) that belongs to a seed and a place."""
    digest = hashlib.blake2b(f"{seed}\n{place}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _adjusted(
    logits_V: Tensor, parameters: SamplingParameters, prompt: Sequence[int], answer: Sequence[int]
) -> Tensor:
    """Add bias, then apply the penalties; the logits themselves stay as they are."""
    size = logits_V.shape[0]
    bias = {token: value for token, value in parameters.logit_bias.items() if token < size}
    repeats = parameters.repetition_penalty != 1.0
    counts = parameters.presence_penalty != 0 or parameters.frequency_penalty != 0
    if not (bias or repeats or counts):
        return logits_V
    adjusted_V = logits_V.clone()
    if bias:
        adjusted_V[list(bias)] += torch.tensor(list(bias.values()), dtype=logits_V.dtype)
    if repeats:
        seen = sorted({token for token in (*prompt, *answer) if token < size})
        values = adjusted_V[seen]
        penalty = parameters.repetition_penalty
        adjusted_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if counts and answer:
        times = Counter(token for token in answer if token < size)
        often = torch.tensor(list(times.values()), dtype=logits_V.dtype)
        cost = parameters.presence_penalty + parameters.frequency_penalty * often
        adjusted_V[list(times)] -= cost
    return adjusted_V


def _draw(logits_V: Tensor, parameters: SamplingParameters, at: float) -> int:
    """Draw among the likeliest tokens that the filters leave, most likely first."""
    order_V = logits_V.argsort(descending=True, stable=True)
    scores_V = logits_V[order_V].double() / parameters.temperature
    probabilities_V = torch.softmax(scores_V, dim=0)
    count = probabilities_V.shape[0]
    if parameters.top_k:
        count = min(count, parameters.top_k)
    if parameters.top_p < 1:
        before_V = probabilities_V.cumsum(0) - probabilities_V
        count = min(count, int((before_V < parameters.top_p).sum()))
    if parameters.min_p > 0:
        least = parameters.min_p * probabilities_V[0]
        count = min(count, int((probabilities_V >= least).sum()))
    reached = probabilities_V[: max(1, count)].cumsum(0)
    place = int(torch.searchsorted(reached, at * reached[-1], right=True))
    return int(order_V[min(place, reached.shape[0] - 1)])
