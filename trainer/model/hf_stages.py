"""The stages of a model whose layers transformers computes.

Owns their names and parameters, which are those of the layer's own modules, so that a shard holds
the tensors of a package under their own names. Knows nothing of a family: `hf_family` runs its
code. Invariant: as for every stage, `forward` reads nothing but its arguments and the
configuration.

Shapes: B rows, T positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from trainer.model.config import ModelConfig
from trainer.model.hf_family import HfModel, hf_model
from trainer.model.micro_batch import MicroBatch
from trainer.model.stages import Parameter, Stage


@dataclass(frozen=True, slots=True)
class HfEmbeddings(Stage):
    """Look up and scale one row a token: int64 [B, T] to [B, T, D], in the compute dtype."""

    @property
    def name(self) -> str:
        return "embeddings"

    @property
    def parameters(self) -> dict[str, Parameter]:
        return _parameters(self.config, _model(self.config).embeddings)

    def forward(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return _model(self.config).embed(params, x)


@dataclass(frozen=True, slots=True)
class HfBlock(Stage):
    """One decoder layer: [B, T, D] to [B, T, D]."""

    index: int

    @property
    def name(self) -> str:
        return f"block_{self.index:03d}"

    @property
    def parameters(self) -> dict[str, Parameter]:
        return _parameters(self.config, _model(self.config).layers[self.index])

    def forward(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return _model(self.config).run_layer(self.index, params, x)

    def forward_of(self, batch: MicroBatch, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return _model(self.config).run_layer(self.index, params, x, batch.documents)


@dataclass(frozen=True, slots=True)
class HfFinalNorm(Stage):
    """Normalise the last block's output: [B, T, D] to [B, T, D]."""

    @property
    def name(self) -> str:
        return "final_norm"

    @property
    def parameters(self) -> dict[str, Parameter]:
        return _parameters(self.config, _model(self.config).norm)

    def forward(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return _model(self.config).run_norm(params, x)


@dataclass(frozen=True, slots=True)
class HfHead(Stage):
    """Score every vocabulary entry: [..., D] to [..., V]. Tied, it carries the embeddings' name."""

    @property
    def name(self) -> str:
        return "embeddings" if self.config.tied_embeddings else "lm_head"

    @property
    def parameters(self) -> dict[str, Parameter]:
        return _parameters(self.config, _model(self.config).head)

    def forward(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return _model(self.config).run_head(params, x)


def hf_trunk(config: ModelConfig) -> list[Stage]:
    """Give every stage before the head, in forward order; the model is built now if never before.

    Who counts what a step holds must not count the building.
    """
    _model(config)
    blocks = [HfBlock(config, index) for index in range(config.num_layers)]
    return [HfEmbeddings(config), *blocks, HfFinalNorm(config)]


def _model(config: ModelConfig) -> HfModel:
    return hf_model(config.hf_config)


def _parameters(config: ModelConfig, module: nn.Module) -> dict[str, Parameter]:
    # Gemma's norms scale by one more than their weight.
    norm: Literal["zeros", "ones"] = (
        "zeros" if str(_model(config).config.model_type).startswith("gemma") else "ones"
    )
    found = {}
    for name, tensor in module.named_parameters():
        shape = tuple(tensor.shape)
        if len(shape) > 1:
            found[name] = Parameter(shape=shape, initial="normal")
        else:
            initial = "zeros" if name.endswith("bias") else norm
            found[name] = Parameter(shape=shape, initial=initial)
    return found
