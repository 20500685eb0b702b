"""Two answers to one prompt, side by side: where they part, and by how much.

Owns the comparison. Knows nothing of requests. The log-probability difference is the mean, over the
tokens both answers begin with, of the second model's log-probability less the first one's: what the
second became surer of since. At the first token that differs each side tells both tokens'
log-probabilities, None for one that was not among its likeliest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from serve.generation import Generation
from serve.logprob_answers import finite, token_text
from serve.openai_answers import Gathered, usage
from serve.requests import TokenEvent


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One model's answer."""

    generation: Generation
    found: Gathered

    @property
    def events(self) -> list[TokenEvent]:
        """Give the tokens of the answer."""
        return [said.event for said in self.found.tokens]

    def to_json(self) -> dict[str, Any]:
        """Describe the answer."""
        model, events = self.generation.model, self.events
        logprobs = [finite(event.logprob) for event in events]
        return {
            "model": model.id,
            "store": model.store,
            "commit": model.fingerprint,
            "step": model.pinned.commit.step,
            "text": self.found.text,
            "tokens": [event.token_id for event in events],
            "token_logprobs": logprobs,
            "mean_logprob": sum(logprobs) / len(logprobs) if logprobs else None,
            "finish_reason": self.found.finish,
            "usage": usage(self.generation),
        }

    def at(self, index: int, tokens: list[int | None]) -> dict[str, Any] | None:
        """Tell the token at `index` and the log-probability of each of `tokens` there."""
        if index >= len(self.events):
            return None
        event = self.events[index]
        known = {**dict(event.top), event.token_id: event.logprob}
        return {
            "token_id": event.token_id,
            "token": token_text(self.generation.model.words.vocabulary, event.token_id),
            "logprobs": [None if t not in known else finite(known[t]) for t in tokens],
        }


def comparison(first: Side, second: Side) -> dict[str, Any]:
    """Compare two answers."""
    same = common_length(first.events, second.events)
    pairs = list(zip(first.events[:same], second.events[:same], strict=True))
    differences = [finite(b.logprob) - finite(a.logprob) for a, b in pairs]
    shards = [side.generation.model.pinned.commit.shards for side in (first, second)]
    shared = [n for n in shards[0] if n in shards[1] and shards[0][n].digest == shards[1][n].digest]
    return {
        "results": [first.to_json(), second.to_json()],
        "common_tokens": same,
        "first_difference": _difference(first, second, same),
        "logprob_difference": sum(differences) / same if same else None,
        "shared_shards": sum(name.startswith("params/") for name in shared),
        "shards": sum(name.startswith("params/") for name in shards[0]),
    }


def common_length(first: list[TokenEvent], second: list[TokenEvent]) -> int:
    """Count the tokens that both begin with."""
    same = 0
    for a, b in zip(first, second, strict=False):
        if a.token_id != b.token_id:
            break
        same += 1
    return same


def _difference(first: Side, second: Side, index: int) -> dict[str, Any] | None:
    """Describe the first token that differs; None where neither goes on."""
    tokens = [
        side.events[index].token_id if index < len(side.events) else None
        for side in (first, second)
    ]
    if tokens == [None, None]:
        return None
    return {"index": index, "sides": [first.at(index, tokens), second.at(index, tokens)]}
