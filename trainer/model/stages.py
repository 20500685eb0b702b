"""The model as a list of stages that each run alone.

Owns the stages' names, their parameters' names and shapes (those of Llama inside a block), and
each stage's pure `forward`. Knows nothing of where parameters come from, of autograd modes or of
stores. Invariant: `forward` reads nothing but its arguments and the configuration, so that running
it twice gives the same bits.

Shapes: see layers.py; V vocabulary, D hidden size.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from shardb import TensorSpec
from trainer.errors import InputError
from trainer.model import layers
from trainer.model.config import ModelConfig
from trainer.model.micro_batch import MicroBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """The shape of a parameter and the rule of its first value."""

    shape: tuple[int, ...]
    initial: Literal["normal", "ones", "zeros"]


@dataclass(frozen=True, slots=True)
class Stage(ABC):
    """One step of the model's forward pass and the parameters it needs.

    `keeps_master_dtype` is true where parameters are only looked up: they are used as stored, and
    the output is cast to the compute dtype instead.
    """

    config: ModelConfig

    keeps_master_dtype: ClassVar[bool] = False
    # The matrix whose product is added to the output and goes nowhere else, where there is one.
    added_last: ClassVar[str | None] = None

    @property
    @abstractmethod
    def name(self) -> str:
        """Give the name that the stage's shards carry: `params/<name>` and `optim/<name>`."""

    @property
    @abstractmethod
    def parameters(self) -> dict[str, Parameter]:
        """Give every parameter by name, in the order in which norms are summed."""

    @abstractmethod
    def forward(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Compute the output from the parameters and the previous stage's output."""

    def forward_of(self, batch: MicroBatch, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Compute `forward` for a micro-batch of which there is something to know."""
        return self.forward(params, x)

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Give the stored form of the parameters: fp32 masters."""
        return {
            name: TensorSpec(dtype="F32", shape=each.shape)
            for name, each in self.parameters.items()
        }


@dataclass(frozen=True, slots=True)
class Embeddings(Stage):
    """Look up one row a token: int64 [B, T] to [B, T, D]."""

    keeps_master_dtype: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "embeddings"

    @property
    def parameters(self) -> dict[str, Parameter]:
        return {"weight": _matrix(self.config.vocab_size, self.config.hidden_size)}

    def forward(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return F.embedding(x, params["weight"])


@dataclass(frozen=True, slots=True)
class Block(Stage):
    """Attention, then the gated feed-forward, each normalised first and added to its input.

    angles_on_device: take the cosines of rotary positions where the block computes, as transformers
    does; otherwise on the host, the same for every device.
    """

    added_last: ClassVar[str | None] = "mlp.down_proj.weight"

    index: int
    angles_on_device: bool = False

    @property
    def name(self) -> str:
        return f"block_{self.index:03d}"

    @property
    def parameters(self) -> dict[str, Parameter]:
        width, inner = self.config.hidden_size, self.config.intermediate_size
        return {
            "input_layernorm.weight": _scale(width),
            **self._attention_parameters(),
            "post_attention_layernorm.weight": _scale(width),
            "mlp.gate_proj.weight": _matrix(inner, width),
            "mlp.up_proj.weight": _matrix(inner, width),
            "mlp.down_proj.weight": _matrix(width, inner),
        }

    def forward(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return self.forward_turned(params, x, self.angles(x))

    def forward_of(self, batch: MicroBatch, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        documents = batch.documents
        if documents is None:
            return self.forward(params, x)
        positions_BT = documents.positions_BT.to(x.device)
        cos_B1TK, sin_B1TK = (table[positions_BT][:, None] for table in self.angles(x))
        mask = documents.mask(x.dtype, x.device)
        return self.forward_turned(params, x, (cos_B1TK, sin_B1TK), mask)

    def angles(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Give the rotary tables [T, K] for an input of this shape and dtype."""
        config = self.config
        return layers.rotary_angles(
            x_BTD.shape[1],
            config.head_dim,
            config.rope_theta,
            x_BTD.dtype,
            x_BTD.device,
            config.rope_scaling,
            made_on=x_BTD.device if self.angles_on_device else None,
        )

    def forward_turned(
        self,
        params: Mapping[str, Tensor],
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
    ) -> Tensor:
        """Compute `forward` with given rotary tables: arithmetic on tensors alone.

        mask: what is added to attention's scores in the place of the causal mask, [B, 1, T, T].
        """
        x = self._attended(params, x, angles, mask)
        return x + layers.swiglu(
            self._second_norm(params, x),
            params["mlp.gate_proj.weight"],
            params["mlp.up_proj.weight"],
            params["mlp.down_proj.weight"],
        )

    def projected(self, params: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Give the heads of queries, keys and values of a block's input."""
        normed = layers.rms_norm(x, params["input_layernorm.weight"], self.config.rms_norm_eps)
        query, key, value = (self._heads(params, letter, normed) for letter in "qkv")
        return query, key, value

    def turned(
        self,
        params: Mapping[str, Tensor],
        heads: tuple[Tensor, Tensor],
        angles: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Give queries and keys as attention takes them."""
        query, key = (
            layers.rotate(self._normed_heads(params, letter, each), *angles)
            for letter, each in zip("qk", heads, strict=True)
        )
        return query, key

    def added(self, params: Mapping[str, Tensor], x: Tensor, mixed_BTW: Tensor) -> Tensor:
        """Add what attention gave to a block's input."""
        output = params["self_attn.o_proj.weight"]
        return x + layers.linear(mixed_BTW, output, params.get("self_attn.o_proj.bias"))

    def gated(self, params: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        """Give what `added_last` takes, of the sum so far: the gate and what it lets through."""
        normed = self._second_norm(params, x)
        gate = layers.linear(normed, params["mlp.gate_proj.weight"])
        return gate, layers.linear(normed, params["mlp.up_proj.weight"])

    def _attended(
        self,
        params: Mapping[str, Tensor],
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        mask: Tensor | None,
    ) -> Tensor:
        query, key, value = self.projected(params, x)
        mixed_BHTK = layers.causal_attention(
            *self.turned(params, (query, key), angles), value, mask
        )
        return self.added(params, x, layers.merge_heads(mixed_BHTK))

    def _second_norm(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        scale = params["post_attention_layernorm.weight"]
        return layers.rms_norm(x, scale, self.config.rms_norm_eps)

    def _attention_parameters(self) -> dict[str, Parameter]:
        config = self.config
        outputs = {"q": config.query_size, "k": config.key_value_size, "v": config.key_value_size}
        found = {}
        for letter, size in outputs.items():
            found[f"self_attn.{letter}_proj.weight"] = _matrix(size, config.hidden_size)
            if config.attention_bias:
                found[f"self_attn.{letter}_proj.bias"] = _bias(size)
        found["self_attn.o_proj.weight"] = _matrix(config.hidden_size, config.query_size)
        if config.attention_output_bias:
            found["self_attn.o_proj.bias"] = _bias(config.hidden_size)
        if config.qk_norm:
            found["self_attn.q_norm.weight"] = _scale(config.head_dim)
            found["self_attn.k_norm.weight"] = _scale(config.head_dim)
        return found

    def _heads(self, params: Mapping[str, Tensor], letter: str, x_BTD: Tensor) -> Tensor:
        projected = layers.linear(
            x_BTD,
            params[f"self_attn.{letter}_proj.weight"],
            params.get(f"self_attn.{letter}_proj.bias"),
        )
        return layers.split_heads(projected, self.config.head_dim)

    def _normed_heads(self, params: Mapping[str, Tensor], letter: str, heads: Tensor) -> Tensor:
        norm_K = params.get(f"self_attn.{letter}_norm.weight")
        return heads if norm_K is None else layers.rms_norm(heads, norm_K, self.config.rms_norm_eps)


@dataclass(frozen=True, slots=True)
class FinalNorm(Stage):
    """Normalise the last block's output: [B, T, D] to [B, T, D]."""

    @property
    def name(self) -> str:
        return "final_norm"

    @property
    def parameters(self) -> dict[str, Parameter]:
        return {"weight": _scale(self.config.hidden_size)}

    def forward(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return layers.rms_norm(x, params["weight"], self.config.rms_norm_eps)


@dataclass(frozen=True, slots=True)
class LmHead(Stage):
    """Score every vocabulary entry: [..., D] to [..., V].

    Tied to the embeddings it has no shard of its own: it carries the embeddings' name.
    """

    @property
    def name(self) -> str:
        return "embeddings" if self.config.tied_embeddings else "lm_head"

    @property
    def parameters(self) -> dict[str, Parameter]:
        return {"weight": _matrix(self.config.vocab_size, self.config.hidden_size)}

    def forward(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return F.linear(x, params["weight"])


def build_trunk(config: ModelConfig) -> list[Stage]:
    """Give every stage before the head, in forward order."""
    if config.hf_config:
        from trainer.model.hf_stages import hf_trunk  # transformers is an extra, and slow to load

        return hf_trunk(config)
    blocks = [Block(config, index) for index in range(config.num_layers)]
    return [Embeddings(config), *blocks, FinalNorm(config)]


def build_head(config: ModelConfig) -> Stage:
    """Give the head; tied, it carries the embeddings' name."""
    if config.hf_config:
        from trainer.model.hf_stages import HfHead

        return HfHead(config)
    return LmHead(config)


def build_stages(config: ModelConfig) -> list[Stage]:
    """Give every stage that owns shards, in forward order: a tied head owns none."""
    trunk = build_trunk(config)
    return trunk if config.tied_embeddings else [*trunk, build_head(config)]


def check_keeps_apart(config: ModelConfig) -> None:
    """Refuse a model whose layers let records that share a row see each other."""
    if not config.hf_config:
        return
    from trainer.model.hf_family import hf_model

    model = hf_model(config.hf_config)
    if not model.keeps_apart():
        raise InputError(
            f"the layers of {model.config.model_type}, as this version of transformers has them,"
            " do not keep apart records that share a row: prepare the data again with"
            " `train-data prepare --attend-across`, or one record a row"
        )


def parameter_count(config: ModelConfig) -> int:
    """Count every trained number once."""
    return sum(
        math.prod(parameter.shape)
        for stage in build_stages(config)
        for parameter in stage.parameters.values()
    )


def _matrix(*shape: int) -> Parameter:
    return Parameter(shape=shape, initial="normal")


def _scale(width: int) -> Parameter:
    return Parameter(shape=(width,), initial="ones")


def _bias(width: int) -> Parameter:
    return Parameter(shape=(width,), initial="zeros")
