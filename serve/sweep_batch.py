"""The rows of one model in one sweep: which tokens, where they are, what they may see.

Owns the index tensors that every stage of a sweep shares. Knows nothing of weights. Invariant, on
the CPU: how rows are put together changes no row's bits (see `attention` and `row_products`).

Shapes: N rows, padded; see attention.py for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serve.attention import AttentionGroup, padded_rows
from serve.row_products import row_multiple
from trainer.model import layers
from trainer.model.config import ModelConfig

# Queries of one request that attend together: bounds the scores in memory.
QUERIES_MAX = 128
# Up to as many queries a request are computed together with those of other requests.
FEW_QUERIES = 16
KEYS_TOGETHER_MAX = 16_384


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Consecutive tokens of one request: ids, the position of the first, all pages so far.

    logit_rows: of how many tokens at its end the logits are wanted.
    """

    ids: Sequence[int]
    start: int
    pages: Sequence[int]
    logit_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepBatch:
    """Everything of a sweep's rows but their values."""

    rows: int
    ids_N: Tensor
    cos_N1K: Tensor
    sin_N1K: Tensor
    slots: Tensor
    groups: Sequence[AttentionGroup]
    logit_index: Tensor
    logit_counts: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """Some queries of one span: their first row and position, and how many."""

    row: int
    position: int
    queries: int
    pages: Sequence[int]


def build_batch(
    spans: Sequence[Span], config: ModelConfig, *, page_tokens: int, dtype: torch.dtype,
    device: torch.device,
) -> SweepBatch:  # fmt: skip
    """Lay spans one after the other and pad the rows at the end."""
    ids = [token for span in spans for token in span.ids]
    positions = [span.start + offset for span in spans for offset in range(len(span.ids))]
    slots = [
        span.pages[position // page_tokens] * page_tokens + position % page_tokens
        for span in spans
        for position in range(span.start, span.start + len(span.ids))
    ]
    rows, multiple = len(ids), row_multiple(config.intermediate_size)
    missing = -rows % multiple
    cos_TK, sin_TK = layers.rotary_angles(
        config.max_position_embeddings, config.head_dim, config.rope_theta, dtype, device,
        config.rope_scaling,
    )  # fmt: skip
    position_index = torch.tensor([*positions, *[0] * missing], device=device)
    logit_index, logit_counts = _logit_rows(spans)
    return SweepBatch(
        rows=rows,
        ids_N=torch.tensor([*ids, *[0] * missing], device=device),
        cos_N1K=cos_TK.index_select(0, position_index)[:, None],
        sin_N1K=sin_TK.index_select(0, position_index)[:, None],
        slots=torch.tensor(slots, device=device),
        groups=_groups(spans, config, page_tokens, device),
        logit_index=torch.tensor(logit_index, dtype=torch.int64, device=device),
        logit_counts=logit_counts,
    )


def _logit_rows(spans: Sequence[Span]) -> tuple[list[int], list[int]]:
    index: list[int] = []
    end = 0
    for span in spans:
        end += len(span.ids)
        index.extend(range(end - span.logit_rows, end))
    return index, [span.logit_rows for span in spans]


def _groups(
    spans: Sequence[Span], config: ModelConfig, page_tokens: int, device: torch.device
) -> list[AttentionGroup]:
    """Put pieces with equally many queries and about equally many pages together."""
    together: dict[tuple[int, int, int], list[_Piece]] = {}
    for piece in _pieces(spans, page_tokens):
        few = piece.queries <= FEW_QUERIES
        key = (piece.queries, len(piece.pages).bit_length(), 0 if few else piece.row + 1)
        together.setdefault(key, []).append(piece)
    total = sum(len(span.ids) for span in spans)
    found = []
    for pieces in together.values():
        keys_max = max(len(piece.pages) for piece in pieces) * page_tokens
        step = max(1, KEYS_TOGETHER_MAX // keys_max)
        for start in range(0, len(pieces), step):
            part = pieces[start : start + step]
            found.append(_group(part, config, page_tokens, total, device))
    return found


def _pieces(spans: Sequence[Span], page_tokens: int) -> list[_Piece]:
    found, row = [], 0
    for span in spans:
        for offset in range(0, len(span.ids), QUERIES_MAX):
            queries = min(QUERIES_MAX, len(span.ids) - offset)
            position = span.start + offset
            count = -(-(position + queries) // page_tokens)
            found.append(
                _Piece(row=row + offset, position=position, queries=queries,
                       pages=span.pages[:count])
            )  # fmt: skip
        row += len(span.ids)
    return found


def _group(
    pieces: Sequence[_Piece], config: ModelConfig, page_tokens: int, total: int,
    device: torch.device,
) -> AttentionGroup:  # fmt: skip
    queries, shared = pieces[0].queries, config.num_heads // config.num_kv_heads
    page_count = max(len(piece.pages) for piece in pieces)
    # Page 0 is nobody's and holds zeros.
    pages = [[*piece.pages, *[0] * (page_count - len(piece.pages))] for piece in pieces]
    rows = [piece.row + offset for piece in pieces for offset in range(queries)]
    last_visible_BQ = torch.tensor(
        [[piece.position + offset for offset in range(queries)] for piece in pieces]
    )
    keys_T = torch.arange(page_count * page_tokens)
    hidden_BQT = keys_T[None, None, :] > last_visible_BQ[:, :, None]
    hidden_BMT = hidden_BQT.repeat_interleave(shared, dim=1)
    padding = padded_rows(queries, shared) - queries * shared
    seen = torch.zeros(len(pieces), padding, keys_T.shape[0], dtype=torch.bool)
    return AttentionGroup(
        requests=len(pieces),
        queries=queries,
        rows=None if rows == list(range(total)) else torch.tensor(rows, device=device),
        pages=torch.tensor(pages, device=device).view(-1),
        hidden_BMT=torch.cat((hidden_BMT, seen), dim=1).to(device),
    )
