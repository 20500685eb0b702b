"""Attention of many requests over pages of keys and values, each as if it were alone.

Owns the arithmetic from rotated queries to mixed values. Invariant, on the CPU: the output of a
query has the same bits whatever queries, requests, padding or later pages come with it. Scores are
summed over the head's width, which is one; weights are those of a softmax whose lanes take keys in
order, so that masked ones at the end add zero; values are summed a page at a time, and pages by a
tree whose shape depends on a page's place alone.

Shapes: B requests, Q queries of each, H query heads, G key heads, R = H / G, K head width, P pages,
S keys a page, T = P * S, M = Q * R rows, padded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from serve.row_products import ROWS_MULTIPLE


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionGroup:
    """Queries that are computed together.

    rows: which rows of the sweep they are, B * Q of them, or None for all rows but padding;
    pages: pages of each request, B * P of them; hidden_BMT: keys that a row may not see.
    """

    requests: int
    queries: int
    rows: Tensor | None
    pages: Tensor
    hidden_BMT: Tensor


def attend(group: AttentionGroup, q_BQHK: Tensor, keys_GPSK: Tensor, values_GPSK: Tensor) -> Tensor:
    """Give the mixed values [B * Q, H * K] of a group's queries, in the dtype of the queries."""
    key_heads, _, page_tokens, width = keys_GPSK.shape
    heads = q_BQHK.shape[1]
    shared = heads // key_heads
    count = group.requests * key_heads
    q_NMK = _rows_by_key_head(q_BQHK, group, key_heads)
    k_NTK = keys_GPSK.index_select(1, group.pages).float().view(count, -1, width)
    v_GPSK = values_GPSK.index_select(1, group.pages).float()
    scores_NMT = torch.bmm(q_NMK, k_NTK.transpose(1, 2)).mul_(width**-0.5)
    scores_GBMT = scores_NMT.view(key_heads, group.requests, *scores_NMT.shape[1:])
    scores_GBMT.masked_fill_(group.hidden_BMT, -torch.inf)
    weights_NMT = torch.softmax(scores_NMT, dim=-1)
    mixed_NMK = _mix_by_page(weights_NMT, v_GPSK.view(count, -1, page_tokens, width))
    kept = mixed_NMK[:, : group.queries * shared]
    kept_GBQRK = kept.reshape(key_heads, group.requests, group.queries, shared, width)
    return kept_GBQRK.permute(1, 2, 0, 3, 4).reshape(-1, heads * width).to(q_BQHK.dtype)


def padded_rows(queries: int, shared: int) -> int:
    """Give M: rows a request and key head, padded as products want them."""
    return -(-queries * shared // ROWS_MULTIPLE) * ROWS_MULTIPLE


def _rows_by_key_head(q_BQHK: Tensor, group: AttentionGroup, key_heads: int) -> Tensor:
    """Lay queries out as [G * B, M, K], fp32, zero rows at the end."""
    width = q_BQHK.shape[-1]
    split = q_BQHK.float().view(group.requests, group.queries, key_heads, -1, width)
    rows = split.permute(2, 0, 1, 3, 4).reshape(key_heads * group.requests, -1, width)
    missing = -rows.shape[1] % ROWS_MULTIPLE
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _mix_by_page(weights_NMT: Tensor, v_NPSK: Tensor) -> Tensor:
    count, pages, page_tokens, width = v_NPSK.shape
    rows = weights_NMT.shape[1]
    split_NPMS = weights_NMT.view(count, rows, pages, page_tokens).transpose(1, 2)
    mixed = torch.bmm(
        split_NPMS.reshape(-1, rows, page_tokens), v_NPSK.reshape(-1, page_tokens, width)
    )
    return sum_as_tree(mixed.view(count, pages, rows, width))


def sum_as_tree(parts_NP: Tensor) -> Tensor:
    """Sum over the second axis: neighbours first; zeros at the end change nothing."""
    while parts_NP.shape[1] > 1:
        if parts_NP.shape[1] % 2:
            even, odd = parts_NP[:, :-1:2], parts_NP[:, 1::2]
            # The last one has no neighbour: it goes on as it is, which is adding zero.
            parts_NP = torch.cat((even + odd, parts_NP[:, -1:]), dim=1)
        else:
            parts_NP = parts_NP[:, ::2] + parts_NP[:, 1::2]
    return parts_NP[:, 0]
