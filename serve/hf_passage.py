"""The way of requests through layers that transformers computes, each request by itself.

Owns the calls of one sweep, and the keys and values that they read from pages and write there.
Knows nothing of a family: masks, windows and rotary positions are those of the family's own code,
which is shown a cache of transformers' own kind whose content lies in pages. Invariant: a call is
what it would be if its request were alone, in memory of its own, so that its bits do not depend on
the requests beside it; `jobs` cuts a text into the same calls whatever else is running.

Shapes: Q tokens of a call, D hidden size, G key heads, K head width, T keys, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from serve.kv_cache import PagedCache
from serve.sweep_batch import Span
from serve.weights import Role, Weights
from trainer.model.config import ModelConfig
from trainer.model.hf_family import Handed, HfModel, hf_model


class HfPassage:
    """The requests of one commit in one sweep."""

    def __init__(self, spans: Sequence[Span], config: ModelConfig, cache: PagedCache) -> None:
        self.logits: Tensor | None = None
        model = hf_model(config.hf_config)
        self._calls = [_Call(span, model, cache) for span in spans]

    @property
    def wants_logits(self) -> bool:
        """Say whether any token's logits are asked for."""
        return any(call.span.logit_rows for call in self._calls)

    def run(self, role: Role, layer: int, weights: Weights) -> None:
        """Take every request through one stage; the head gives fp32 logits [rows, V]."""
        for call in self._calls:
            call.run(role, layer, weights)
        if role == "head":
            found = [call.logits for call in self._calls if call.logits is not None]
            self.logits = torch.cat(found) if found else None


class _Call:
    """What one request computes: tokens after its past."""

    def __init__(self, span: Span, model: HfModel, cache: PagedCache) -> None:
        self.span = span
        self.logits: Tensor | None = None
        self._model = model
        self._cache = cache
        self._x_1QD = torch.empty(0)
        self._handed: list[Handed] = []

    def run(self, role: Role, layer: int, weights: Weights) -> None:
        model, rows = self._model, self.span.logit_rows
        if role == "table":
            device = self._cache.keys_LGPSK.device
            ids_1Q = torch.tensor([self.span.ids], device=device)
            past = paged_past(model, self.span, self._cache)
            self._x_1QD, self._handed = model.embed_after(weights, ids_1Q, past)
        elif role == "block":
            handed = self._handed[layer]
            self._x_1QD = model.run_layer_after(layer, weights, self._x_1QD, handed)
        elif role == "norm":
            self._x_1QD = model.run_norm(weights, self._x_1QD)
        elif rows:
            self.logits = model.run_head(weights, self._x_1QD[:, -rows:])[0].float().cpu()


def paged_past(model: HfModel, span: Span, cache: PagedCache) -> Any:
    """Give transformers' own cache, whose layers keep their keys and values in a request's pages.

    What a layer says of its length and window stays its own; where it stores is replaced.
    """
    past = model.new_past()
    page_tokens = cache.geometry.page_tokens
    device = cache.keys_LGPSK.device
    places = range(span.start, span.start + len(span.ids))
    slots = [span.pages[at // page_tokens] * page_tokens + at % page_tokens for at in places]
    slots_Q = torch.tensor(slots, device=device)
    pages = torch.tensor(span.pages[: -(-places.stop // page_tokens)], device=device)
    for index, layer in enumerate(past.layers):
        first = max(0, span.start + 1 - layer.sliding_window) if layer.is_sliding else 0
        layer.cumulative_length = span.start
        layer.get_seq_length = partial(_length, span.start)
        stores = (cache.keys_LGPSK[index], cache.values_LGPSK[index])
        layer.update = partial(_update, stores, slots_Q, pages, first, places.stop)
    return past


def _length(tokens: int, *_: Any, **__: Any) -> int:
    return tokens


def _update(
    stores: tuple[Tensor, Tensor], slots_Q: Tensor, pages: Tensor, first: int, end: int,
    keys_1GQK: Tensor, values_1GQK: Tensor, *_: Any, **__: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write a call's keys and values into pages, and give all that its queries may look at."""
    found = []
    for store_GPSK, new_1GQK in zip(stores, (keys_1GQK, values_1GQK), strict=True):
        heads, width = store_GPSK.shape[0], store_GPSK.shape[-1]
        store_GPSK.view(heads, -1, width).index_copy_(1, slots_Q, new_1GQK[0])
        all_GTK = store_GPSK.index_select(1, pages).view(heads, -1, width)
        found.append(all_GTK[None, :, first:end])
    return found[0], found[1]
