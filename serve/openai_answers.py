"""What /v1/completions and /v1/chat/completions answer, whole or as events.

Owns the shapes. Knows nothing of connections. Invariants: a whole answer and the events of the same
request hold the same texts, log-probabilities and usage; every event of a request has the same id,
time, model and fingerprint; only the last event of a choice has a `finish_reason`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from serve.choice import Piece, SaidToken
from serve.detokenize import Detokenizer
from serve.generation import Generation
from serve.logprob_answers import chat_logprobs, completion_logprobs, joined, prompt_logprobs
from serve.requests import PromptLogprobs
from serve.sampling_fields import Wanted
from serve.vocabulary import Vocabulary


@dataclass(kw_only=True)
class Gathered:
    """One choice of an answer that is not streamed."""

    texts: list[str] = field(default_factory=list)
    tokens: list[SaidToken] = field(default_factory=list)
    prompt: PromptLogprobs | None = None
    finish: str | None = None
    ended_by: str | int | None = None

    @property
    def text(self) -> str:
        """Give the whole text."""
        return "".join(self.texts)

    def take(self, piece: Piece) -> None:
        """Add a piece."""
        self.texts.append(piece.text)
        self.tokens += piece.tokens
        self.prompt = piece.prompt or self.prompt
        self.finish = piece.finish or self.finish
        self.ended_by = piece.ended_by if piece.ended_by is not None else self.ended_by


async def gather(generation: Generation) -> list[Gathered]:
    """Wait for every answer of a request."""
    found = [Gathered() for _ in generation.choices]
    async for piece in generation.pieces():
        found[piece.index].take(piece)
    return found


def usage(generation: Generation) -> dict[str, Any]:
    """Give the token counts of a request."""
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    cached = max((choice.cached_tokens for choice in generation.choices), default=0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": min(cached, prompt)},
    }


class ChatAnswers:
    """Answers of /v1/chat/completions."""

    def __init__(self, generation: Generation, wanted: Wanted) -> None:
        self._generation = generation
        self.wanted = wanted
        self._vocabulary = generation.model.words.vocabulary
        self._head = _head("chatcmpl", generation)

    async def whole(self) -> dict[str, Any]:
        """Give the answer in one piece."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": each.text, "refusal": None},
                "logprobs": self._logprobs(each.tokens),
                "finish_reason": each.finish,
            }
            for index, each in enumerate(await gather(self._generation))
        ]
        head = {**self._head, "object": "chat.completion"}
        return {**head, "choices": choices, "usage": usage(self._generation)}

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Give the answer as events: the role first, the end of each choice in an event alone."""
        begun: set[int] = set()
        async for piece in self._generation.pieces():
            if piece.index not in begun:
                begun.add(piece.index)
                role = {"role": "assistant", "content": "", "refusal": None}
                yield self._event(piece.index, role)
            if piece.text or piece.tokens:
                yield self._event(
                    piece.index, {"content": piece.text}, logprobs=self._logprobs(piece.tokens)
                )
            if piece.finish is not None:
                yield self._event(piece.index, {}, finish=piece.finish)
        if self.wanted.include_usage:
            yield {**self._event_head(), "choices": [], "usage": usage(self._generation)}

    def _event_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"}

    def _event(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish: str | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        event = {**self._event_head(), "choices": [choice]}
        return {**event, "usage": None} if self.wanted.include_usage else event

    def _logprobs(self, tokens: Sequence[SaidToken]) -> dict[str, Any] | None:
        count = self.wanted.logprobs
        return None if count is None else chat_logprobs(self._vocabulary, tokens, count)


class CompletionAnswers:
    """Answers of /v1/completions; `n` of `best_of` answers are told for each prompt."""

    def __init__(self, generation: Generation, wanted: Wanted) -> None:
        self._generation = generation
        self.wanted = wanted
        self._vocabulary = generation.model.words.vocabulary
        self._head = {**_head("cmpl", generation), "object": "text_completion"}

    async def whole(self) -> dict[str, Any]:
        """Give the answer in one piece."""
        found = await gather(self._generation)
        choices: list[dict[str, Any]] = []
        for at in self._best():
            each = found[at]
            starts, echoed = self._echo(at)
            finish = "length" if self.wanted.max_tokens == 0 else each.finish
            choices.append(
                {
                    "index": len(choices),
                    "text": echoed + each.text,
                    "logprobs": self._logprobs(each.tokens, each.prompt, starts, len(echoed)),
                    "finish_reason": finish,
                }
            )
        return {**self._head, "choices": choices, "usage": usage(self._generation)}

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Give the answer as events; an echoed prompt comes with a choice's first one."""
        begun: dict[int, int] = {}
        waiting: dict[int, PromptLogprobs] = {}
        async for piece in self._generation.pieces():
            if piece.prompt is not None:
                waiting[piece.index] = piece.prompt
                continue
            is_first = piece.index not in begun
            starts, echoed = self._echo(piece.index) if is_first else ([], "")
            begun.setdefault(piece.index, len(echoed))
            offset = begun[piece.index]
            prompt = waiting.pop(piece.index, None)
            choice = {
                "index": piece.index,
                "text": echoed + piece.text,
                "logprobs": self._logprobs(piece.tokens, prompt, starts, offset),
                "finish_reason": piece.finish,
            }
            event = {**self._head, "choices": [choice]}
            yield {**event, "usage": None} if self.wanted.include_usage else event
        if self.wanted.include_usage:
            yield {**self._head, "choices": [], "usage": usage(self._generation)}

    def _best(self) -> list[int]:
        """Choose the answers told: of each prompt's, those with the best mean log-probability."""
        size, n = self.wanted.best_of, self.wanted.n
        chosen = []
        for first in range(0, len(self._generation.choices), size):
            group = self._generation.choices[first : first + size]
            if n < size:
                group = sorted(group, key=lambda c: -c.logprob_sum / max(1, c.token_count))[:n]
            chosen += [choice.index for choice in group]
        return chosen

    def _echo(self, index: int) -> tuple[list[int], str]:
        if not self.wanted.echo:
            return [], ""
        plan = self._generation.plans[index]
        starts, text = echoed_text(self._vocabulary, plan.prompt_ids)
        if plan.text is None or plan.text == text:
            return starts, text
        # Some tokenizers write a space before a text, and a beginning may have a control token.
        shift = len(plan.text) - len(text)
        return [max(0, start + shift) for start in starts], plan.text

    def _logprobs(
        self,
        tokens: Sequence[SaidToken],
        prompt: PromptLogprobs | None,
        starts: Sequence[int],
        offset: int,
    ) -> dict[str, Any] | None:
        count = self.wanted.logprobs
        if count is None:
            return None
        first = None if prompt is None else prompt_logprobs(self._vocabulary, prompt, starts, count)
        return joined(first, completion_logprobs(self._vocabulary, tokens, count, offset=offset))


def echoed_text(vocabulary: Vocabulary, ids: Sequence[int]) -> tuple[list[int], str]:
    """Give where each token of a prompt begins in its text, and the text."""
    detokenizer = Detokenizer(vocabulary)
    starts, text = [], ""
    for token in ids:
        said = detokenizer.push(token)
        starts.append(len(text) + detokenizer.lead(token, said))
        text += said
    return starts, text + detokenizer.finish()


def _head(prefix: str, generation: Generation) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": "",
        "created": int(time.time()),
        "model": generation.model.id,
        "system_fingerprint": generation.model.fingerprint,
    }
