"""Which tensors a package has: their names there, their places in the store, their stored form.

Owns the forms a weight can take and the order of the tensors. A store that was imported keeps the
names and forms it came with; else the names are the family's. Knows nothing of files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from export.families import FAMILIES, places
from export.hf_config import missing_biases
from export.package_weights import Weights
from export.source_package import SourcePackage
from trainer.model.config import ModelConfig

# What `--dtype` is called in a safetensors header and in torch.
STORED_DTYPES: Mapping[str, str] = MappingProxyType({"fp32": "F32", "bf16": "BF16", "fp16": "F16"})
ZEROS = ""
TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
)
TORCH_NAMES: Mapping[str, str] = MappingProxyType(
    {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackageTensor:
    """One tensor of a package; `shard` and `tensor` say where the store has it.

    `tensor` is ZEROS for a bias that the family has and the model has not.
    """

    name: str
    shard: str
    tensor: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """Count the numbers."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Give the size in the package."""
        return self.elements * TORCH_DTYPES[self.dtype].itemsize


def package_tensors(weights: Weights, family: str, dtype: str | None) -> list[PackageTensor]:
    """List the tensors in the order of the store's stages; `dtype` None keeps the imported form."""
    if weights.source is not None:
        return source_tensors(weights.source, dtype)
    return native_tensors(weights.model, family, STORED_DTYPES[dtype or "fp32"])


def native_tensors(model: ModelConfig, family: str, dtype: str) -> list[PackageTensor]:
    """List the tensors of a model that this project's own stages compute."""
    found = [
        PackageTensor(
            name=name, shard=place.shard, tensor=place.tensor, shape=place.shape, dtype=dtype
        )
        for name, place in places(FAMILIES[family], model).items()
    ]
    sizes = dict.fromkeys("qkv", model.key_value_size) | {
        "q": model.query_size,
        "o": model.hidden_size,
    }
    return found + [
        PackageTensor(
            name=f"model.layers.{index}.self_attn.{letter}_proj.bias",
            shard=f"params/block_{index:03d}",
            tensor=ZEROS,
            shape=(sizes[letter],),
            dtype=dtype,
        )
        for index in range(model.num_layers)
        for letter in missing_biases(model, family)
    ]


def prevailing_dtype(tensors: list[PackageTensor]) -> str:
    """Give the form that most bytes have: what the configuration calls the package's dtype."""
    sums: dict[str, int] = {}
    for tensor in tensors:
        sums[tensor.dtype] = sums.get(tensor.dtype, 0) + tensor.bytes
    return max(sums, key=lambda name: sums[name])


def source_tensors(source: SourcePackage, dtype: str | None) -> list[PackageTensor]:
    """List the tensors as they were imported, those held under two names included."""
    found = {
        each.name: PackageTensor(
            name=each.name,
            shard=each.shard,
            tensor=each.tensor,
            shape=each.shape,
            dtype=each.dtype if dtype is None else STORED_DTYPES[dtype],
        )
        for each in source.tensors
    }
    for alias, name in source.aliases.items():
        found[alias] = replace(found[name], name=alias)
    return sorted(found.values(), key=lambda tensor: (tensor.shard, tensor.name))
