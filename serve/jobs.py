"""One request from its submission to its end.

Owns what is known of it: its tokens, its pages, how far its keys and values are computed, and the
events it was sent. Knows nothing of sweeps or weights. Invariant: exactly one `Finished` is sent.

A job's text is its prompt and the answer so far; `computed` of its tokens have their keys and
values in the cache. A job that is not held up by its prompt has one token that has not.

Where transformers computes the layers, bits depend on how a text is cut into calls. Such a text is
always cut alike: the prompt, then single tokens, also when it is computed again after a pause; it
shares no page with others. A text that outgrows the length at which a family changes its rotary
positions is begun anew there, as transformers does it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from serve.kv_cache import PagedCache, PageName, page_names
from serve.pinned import PinnedModel
from serve.requests import (
    Finished,
    PromptLogprobs,
    Reason,
    SamplingParameters,
    Sink,
    TokenEvent,
    TopLogprobs,
)
from serve.rotary_turn import turn_length
from serve.sampling import Choice, choose, existing, likeliest
from shardb.errors import ShardbError

LOG = logging.getLogger(__name__)


class Job:
    """A submitted request; only `cancel` and `is_finished` are for other threads."""

    def __init__(
        self,
        pinned: PinnedModel,
        prompt_ids: Sequence[int],
        parameters: SamplingParameters,
        sink: Sink,
        wake: Callable[[], None],
    ) -> None:
        self.pinned = pinned
        self.parameters = parameters
        self.ids = list(prompt_ids)
        self.prompt_length = len(self.ids)
        self.computed = 0
        self.pages: list[int] = []
        self.is_cancelled = False
        self.is_finished = False
        self.reason: Reason | None = None
        self.cached_tokens = 0
        self.calls_are_fixed = bool(pinned.config.hf_config)
        self._turn_length = turn_length(pinned.config)
        self._named_pages = 0
        self._names: list[PageName] = []
        self._end: Finished | None = None
        self._sink = sink
        self._wake = wake
        self._seed = int.from_bytes(os.urandom(8)) if parameters.seed is None else parameters.seed
        self._prompt_scores: list[tuple[float, TopLogprobs]] = []
        self._prompt_told = not parameters.prompt_logprobs
        self._end_ids = parameters.stop_token_ids
        if not parameters.ignore_eos:
            self._end_ids = self._end_ids | {pinned.config.eos_token_id}

    # For any thread

    def cancel(self) -> None:
        """Stop within one sweep; the last event is then Finished("cancelled")."""
        self.is_cancelled = True
        self._wake()

    # For the worker

    @property
    def answer(self) -> list[int]:
        """Give the tokens of the answer so far."""
        return self.ids[self.prompt_length :]

    @property
    def wants_prompt_scores(self) -> bool:
        """Say whether log-probabilities of the prompt are still to be told."""
        return not self._prompt_told

    @property
    def tokens_max(self) -> int:
        """Give the most tokens whose keys and values the job will ever need."""
        return self.prompt_length + max(0, self.parameters.max_tokens - 1)

    @property
    def first_call(self) -> int:
        """Give the tokens of the first call, where calls are fixed."""
        turn = self._turn_length
        if turn is not None and self.prompt_length <= turn < len(self.ids):
            return turn + 1
        return self.prompt_length

    def begin(self, cache: PagedCache) -> int:
        """Take over what the cache knows of the text; give the tokens found."""
        self.computed = self._named_pages = 0
        self._prompt_scores = []
        if self.wants_prompt_scores or self.calls_are_fixed:
            return 0
        page_tokens = cache.geometry.page_tokens
        self._extend_names(page_tokens, len(self.ids))
        # The last token's logits are needed, so it is always computed.
        usable = (len(self.ids) - 1) // page_tokens
        self.pages = cache.find(self._names[:usable])
        self._named_pages = len(self.pages)
        self.computed = len(self.pages) * page_tokens
        return self.computed

    def pause(self, cache: PagedCache) -> None:
        """Give all pages up: what is computed is computed again later, to the same bits."""
        cache.give_back(self.pages)
        self.pages = []
        self.computed = self._named_pages = 0

    def name_pages(self, cache: PagedCache) -> None:
        """Let later requests find the pages that are full."""
        if self.calls_are_fixed:
            return
        page_tokens = cache.geometry.page_tokens
        full = self.computed // page_tokens
        if full > self._named_pages:
            self._extend_names(page_tokens, self.computed)
            for index in range(self._named_pages, full):
                cache.name_page(self.pages[index], self._names[index])
            self._named_pages = full

    def _extend_names(self, page_tokens: int, tokens: int) -> None:
        if tokens // page_tokens > len(self._names):
            self._names = page_names(self.pinned.commit.id, self.ids[:tokens], page_tokens)

    def score_prompt(self, logits_QV: Tensor, start: int) -> None:
        """Note the log-probabilities of the prompt tokens after positions `start`, start + 1, …"""
        for offset, logits_V in enumerate(logits_QV):
            following = start + offset + 1
            if following >= self.prompt_length:
                return
            logprobs_V = torch.log_softmax(existing(logits_V, self.parameters), dim=-1)
            top = likeliest(logprobs_V, self.parameters.top_logprobs)
            self._prompt_scores.append((float(logprobs_V[self.ids[following]]), top))

    def tell_prompt(self) -> None:
        """Send the prompt's log-probabilities once they are all known."""
        if self._prompt_told:
            return
        assert len(self._prompt_scores) == self.prompt_length - 1, "every token but the first"
        self._prompt_told = True
        self._send(
            PromptLogprobs(
                token_ids=tuple(self.ids[: self.prompt_length]),
                logprobs=(None, *(score for score, _ in self._prompt_scores)),
                top=((), *(top for _, top in self._prompt_scores)),
            )
        )

    def choose_next(self, logits_V: Tensor) -> int | None:
        """Choose the next token and send it; None when the answer has ended."""
        chosen = choose(
            logits_V,
            self.parameters,
            prompt=self.ids[: self.prompt_length],
            answer=self.answer,
            seed=self._seed,
        )
        if chosen.token_id in self._end_ids:
            self.finish("stop", stop_token_id=chosen.token_id)
            return None
        self._add(chosen)
        if len(self.ids) - self.prompt_length >= self.parameters.max_tokens:
            self.finish("length")
        return None if self.is_finished else chosen.token_id

    def _add(self, chosen: Choice) -> None:
        self.ids.append(chosen.token_id)
        self._send(TokenEvent(token_id=chosen.token_id, logprob=chosen.logprob, top=chosen.top))

    def finish(
        self,
        reason: Reason,
        *,
        error: ShardbError | None = None,
        stop_token_id: int | None = None,
    ) -> None:
        """Say how the request ends; does nothing when it has ended already."""
        if self.is_finished:
            return
        self.reason = reason
        self._end = Finished(
            reason=reason,
            error=error,
            stop_token_id=stop_token_id,
            cached_tokens=self.cached_tokens,
        )
        self.is_finished = True

    def tell_end(self) -> None:
        """Send the last event, once nothing is held any more for the request."""
        assert self._end is not None, "it has finished"
        self._send(self._end)

    def _send(self, event: PromptLogprobs | TokenEvent | Finished) -> None:
        try:
            self._sink(event)
        except Exception:
            LOG.warning("a request's receiver failed: the request is cancelled", exc_info=True)
            self.is_cancelled = True
