"""The decoder over pages of past keys and values: one stage of one model at a time.

Owns the arithmetic of a stage for the rows of a sweep. Knows nothing of requests, shelves or
sampling. The formulas are those of `trainer.model`; only attention reads a cache.

Shapes: N rows, padded; see attention.py and trainer.model.layers for the others.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from serve.attention import attend
from serve.kv_cache import PagedCache
from serve.row_products import ROWS_MULTIPLE, RowProducts, silu_
from serve.sweep_batch import SweepBatch
from serve.weights import Role, Weights
from trainer.model import layers
from trainer.model.config import ModelConfig


class Decoder:
    """Computes the stages of models of one dtype on one device."""

    def __init__(self, products: RowProducts, dtype: torch.dtype) -> None:
        self._products = products
        self._dtype = dtype

    def run(
        self, role: Role, layer: int, weights: Weights, x_ND: Tensor | None, batch: SweepBatch,
        config: ModelConfig, cache: PagedCache,
    ) -> Tensor:  # fmt: skip
        """Give a stage's output: hidden values [N, D], or from the head fp32 logits [rows, V]."""
        if role == "table":
            return F.embedding(batch.ids_N, weights["weight"]).to(torch.float32).to(self._dtype)
        assert x_ND is not None, "a table comes first"
        if role == "block":
            return self._block(layer, weights, x_ND, batch, config, cache)
        if role == "norm":
            return layers.rms_norm(x_ND, weights["weight"], config.rms_norm_eps)
        return self._head(weights, x_ND, batch)

    def _block(
        self, layer: int, weights: Weights, x_ND: Tensor, batch: SweepBatch, config: ModelConfig,
        cache: PagedCache,
    ) -> Tensor:  # fmt: skip
        eps = config.rms_norm_eps
        normed = layers.rms_norm(x_ND, weights["input_layernorm.weight"], eps)
        x_ND = x_ND + self._attention(layer, weights, normed, batch, config, cache)
        normed = layers.rms_norm(x_ND, weights["post_attention_layernorm.weight"], eps)
        gate_NF = self._linear(normed, weights, "mlp.gate_proj")
        inner_NF = silu_(gate_NF, is_host=self._products.is_host)
        inner_NF = inner_NF.mul_(self._linear(normed, weights, "mlp.up_proj"))
        return x_ND + self._linear(inner_NF, weights, "mlp.down_proj")

    def _attention(
        self, layer: int, weights: Weights, x_ND: Tensor, batch: SweepBatch, config: ModelConfig,
        cache: PagedCache,
    ) -> Tensor:  # fmt: skip
        q_NHK, k_NGK, v_NGK = (self._heads(weights, each, x_ND, config) for each in "qkv")
        q_NHK = layers.rotate(q_NHK, batch.cos_N1K, batch.sin_N1K)
        k_NGK = layers.rotate(k_NGK, batch.cos_N1K, batch.sin_N1K)
        keys_GPSK, values_GPSK = cache.keys_LGPSK[layer], cache.values_LGPSK[layer]
        for pages, new in ((keys_GPSK, k_NGK), (values_GPSK, v_NGK)):
            flat = pages.view(pages.shape[0], -1, pages.shape[-1])
            flat.index_copy_(1, batch.slots, new[: batch.rows].transpose(0, 1))
        mixed_ND = x_ND.new_zeros(x_ND.shape[0], config.query_size)
        for group in batch.groups:
            rows = slice(0, batch.rows) if group.rows is None else group.rows
            q_BQHK = q_NHK[rows]
            mixed_ND[rows] = attend(group, q_BQHK, keys_GPSK, values_GPSK)
        return self._linear(mixed_ND, weights, "self_attn.o_proj")

    def _heads(self, weights: Weights, letter: str, x_ND: Tensor, config: ModelConfig) -> Tensor:
        projected = self._linear(x_ND, weights, f"self_attn.{letter}_proj")
        heads = projected.view(x_ND.shape[0], -1, config.head_dim)
        norm_K = weights.get(f"self_attn.{letter}_norm.weight")
        return heads if norm_K is None else layers.rms_norm(heads, norm_K, config.rms_norm_eps)

    def _head(self, weights: Weights, x_ND: Tensor, batch: SweepBatch) -> Tensor:
        wanted = x_ND.index_select(0, batch.logit_index)
        missing = -wanted.shape[0] % ROWS_MULTIPLE
        padded = F.pad(wanted, (0, 0, 0, missing)) if missing else wanted
        return self._products.linear(padded, weights["weight"])[: wanted.shape[0]].float().cpu()

    def _linear(self, x: Tensor, weights: Weights, name: str) -> Tensor:
        return self._products.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


class RowsPassage:
    """The requests of one commit in one sweep, all their rows together."""

    def __init__(
        self, decoder: Decoder, batch: SweepBatch, config: ModelConfig, cache: PagedCache
    ) -> None:
        self.logits: Tensor | None = None
        self._decoder = decoder
        self._batch = batch
        self._config = config
        self._cache = cache
        self._x_ND: Tensor | None = None

    @property
    def wants_logits(self) -> bool:
        """Say whether any row's logits are asked for."""
        return self._batch.logit_index.numel() > 0

    def run(self, role: Role, layer: int, weights: Weights) -> None:
        """Take every row through one stage."""
        found = self._decoder.run(
            role, layer, weights, self._x_ND, self._batch, self._config, self._cache
        )
        if role == "head":
            self.logits = found
        else:
            self._x_ND = found
