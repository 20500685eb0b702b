"""One answer while it comes: events of the scheduler in, pieces of text out.

Owns the joining of detokenizer, stop strings and log-probabilities. Knows nothing of HTTP or JSON.
Invariants: the pieces' texts together are the answer's text, streamed or not; a token is told with
the piece in which its text begins; a token whose text begins inside a stop string is not told.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from serve.detokenize import Detokenizer
from serve.errors import stopping
from serve.requests import Event, Finished, PromptLogprobs, TokenEvent
from serve.stop_strings import StopStrings
from serve.vocabulary import Vocabulary


@dataclass(frozen=True, kw_only=True, slots=True)
class SaidToken:
    """A token of an answer; `start` is where its text begins in the answer, in characters."""

    event: TokenEvent
    start: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What is new of one answer; `finish` is "stop" or "length" with the last piece."""

    index: int
    text: str = ""
    tokens: tuple[SaidToken, ...] = ()
    finish: str | None = None
    prompt: PromptLogprobs | None = None
    ended_by: str | int | None = None


class Choice:
    """The text of one answer."""

    def __init__(
        self,
        index: int,
        vocabulary: Vocabulary,
        stops: StopStrings,
        *,
        skip_special: bool = True,
    ) -> None:
        self.index = index
        self.token_count = 0
        self.logprob_sum = 0.0
        self.cached_tokens = 0
        self.finish: str | None = None
        self._detokenizer = Detokenizer(vocabulary, skip_special=skip_special)
        self._stops = stops
        self._made = 0  # characters made of tokens
        self._said = 0  # characters released
        self._pending: deque[SaidToken] = deque()

    def take(self, event: Event) -> Piece | None:
        """Take in an event; None where there is nothing new to tell.

        Raises:
            ShardbError: the generation failed.
        """
        if self.finish is not None:
            return None
        if isinstance(event, PromptLogprobs):
            return Piece(index=self.index, prompt=event)
        if isinstance(event, TokenEvent):
            return self._take_token(event)
        return self._take_end(event)

    def _take_token(self, event: TokenEvent) -> Piece | None:
        self.token_count += 1
        self.logprob_sum += event.logprob
        text = self._detokenizer.push(event.token_id)
        lead = self._detokenizer.lead(event.token_id, text)
        self._pending.append(SaidToken(event=event, start=self._made + lead))
        self._made += len(text)
        said = self._stops.push(text)
        self._said += len(said)
        if self._stops.hit is not None:
            self.finish = "stop"
        if not said and self.finish is None:
            return None
        return self._piece(said, self._told(self._said), ended_by=self._stops.hit)

    def _take_end(self, event: Finished) -> Piece:
        if event.reason not in ("stop", "length"):
            raise event.error or stopping()
        rest = self._detokenizer.finish()
        said = self._stops.push(rest)
        ended_by: str | int | None = event.stop_token_id
        self.finish = event.reason
        self.cached_tokens = event.cached_tokens
        if self._stops.hit is None:
            said += self._stops.finish()
            self._said = self._made + len(rest) + 1  # every token is told
        else:
            self._said += len(said)
            self.finish, ended_by = "stop", self._stops.hit
        return self._piece(said, self._told(self._said), ended_by=ended_by)

    def _told(self, end: int) -> tuple[SaidToken, ...]:
        told = []
        while self._pending and self._pending[0].start < end:
            told.append(self._pending.popleft())
        return tuple(told)

    def _piece(
        self, text: str, tokens: tuple[SaidToken, ...], *, ended_by: str | int | None
    ) -> Piece:
        return Piece(
            index=self.index, text=text, tokens=tokens, finish=self.finish, ended_by=ended_by
        )
