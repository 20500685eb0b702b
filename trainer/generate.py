"""Text from a commit: sample the next token, stream the text.

Owns sampling and the turning of tokens into text while they come. Knows nothing of stores, flags or
where output goes; the logits come from a function. Invariants: the pieces of text together are
the decoding of all tokens; with one seed the text is always the same.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.errors import InputError

# Below this the division by the temperature overflows; the most likely token is the limit anyway.
GREEDY_BELOW = 1e-5
# A character has at most four bytes, and a token at least one.
HELD_TOKENS_MAX = 4

NextLogits = Callable[[Sequence[int]], Tensor]
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is chosen: `top_k` 0 and `top_p` 1 take every token into account."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"--temperature is {self.temperature}: give 0 (greedy) or more")
        if self.top_k < 0:
            raise InputError(f"--top-k is {self.top_k}: give 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise InputError(f"--top-p is {self.top_p}: give more than 0, at most 1 (all tokens)")

    def choose(self, logits_V: Tensor, generator: torch.Generator) -> int:
        """Choose a token by logits [V] on the host."""
        if self.temperature < GREEDY_BELOW:
            return int(logits_V.argmax())
        order_V = logits_V.argsort(descending=True, stable=True)
        scores_V = logits_V[order_V].double() / self.temperature
        probabilities_V = torch.softmax(scores_V, dim=0)
        kept = self._kept(probabilities_V)
        choice = torch.multinomial(probabilities_V[:kept], 1, generator=generator)
        return int(order_V[choice])

    def _kept(self, probabilities_V: Tensor) -> int:
        """Count the most likely tokens that may be chosen: at least one."""
        count = probabilities_V.shape[0]
        if self.top_k:
            count = min(count, self.top_k)
        if self.top_p < 1:
            before_V = probabilities_V.cumsum(0) - probabilities_V
            count = min(count, int((before_V < self.top_p).sum()))
        return max(1, count)


def generate_ids(
    next_logits: NextLogits,
    prompt: Sequence[int],
    *,
    sampling: Sampling,
    max_new_tokens: int,
    seed: int,
    end_id: int,
) -> Iterator[int]:
    """Yield tokens until `end_id`, which is not yielded, or `max_new_tokens`."""
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(max_new_tokens):
        token = sampling.choose(next_logits(ids), generator)
        if token == end_id:
            return
        ids.append(token)
        yield token


def stream_text(ids: Iterator[int], decode: Decode, *, prompt: Sequence[int] = ()) -> Iterator[str]:
    """Yield text as tokens come; bytes of an unfinished character are held until it is whole.

    It goes on from `prompt`, whose own text is not yielded.
    """
    seen = list(prompt)
    # Tokens before `begun` are said; those from `begun` to `said` are decoded again as context,
    # because a decoder may treat the first token of a text in its own way.
    begun, said = 0, len(seen)
    for token in ids:
        seen.append(token)
        context, text = decode(seen[begun:said]), decode(seen[begun:])
        unfinished = text.endswith("\ufffd") and len(seen) - said < HELD_TOKENS_MAX
        if len(text) > len(context) and not unfinished:
            yield text[len(context) :]
            begun, said = said, len(seen)
    rest = decode(seen[begun:])[len(decode(seen[begun:said])) :]
    if rest:
        yield rest
