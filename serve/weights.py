"""A stage's parameters as the sweep computes with them.

Owns the names of stages and the three roles that a shard has: a table that is looked up, a block, a
head. Knows nothing of when they are brought in. Invariant: parameters that stay resident are a copy
of their own, which neither the store's files nor its leases touch any more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from serve.pinned import PinnedModel
from serve.row_products import RowProducts
from shardb.errors import UsageError
from trainer.device import Device
from trainer.model.stages import LmHead, build_trunk

Role = Literal["table", "block", "norm", "head"]
Weights = Mapping[str, Tensor]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class StageKey:
    """One stage of any commit: equal digests in equal roles are equal weights."""

    digest: str
    role: Role


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlace:
    """A stage of one model: where it is read from, what it is, how many numbers it has."""

    pinned: PinnedModel
    shard: str
    key: StageKey
    index: int
    values: int


def stage_places(pinned: PinnedModel) -> list[StagePlace]:
    """Give every stage of a model in forward order, the head last.

    Raises:
        UsageError: the commit has no such shards, so its model is of another kind.
    """
    if pinned.config.hf_config:
        raise UsageError(
            f"step {pinned.commit.step} holds a model whose layers transformers computes: it can be"
            " trained and exported, but only models of this project's own stages are served"
        )
    stages = [*build_trunk(pinned.config), LmHead(pinned.config)]
    places = []
    for index, stage in enumerate(stages):
        shard = f"params/{stage.name}"
        if shard not in pinned.commit.shards:
            raise UsageError(
                f"step {pinned.commit.step} has no shard {shard}: its model is not one of this"
                " project's own geometry, and cannot be served"
            )
        key = StageKey(digest=pinned.digest(shard), role=_role(index, len(stages)))
        values = sum(math.prod(each.shape) for each in stage.parameters.values())
        places.append(StagePlace(pinned=pinned, shard=shard, key=key, index=index, values=values))
    return places


def bring_weights(
    place: StagePlace,
    device: Device,
    dtype: torch.dtype,
    products: RowProducts,
    *,
    keep: bool,
) -> Weights:
    """Read and check a stage; with `keep` as a copy of its own, packed for the processor.

    Without it they may be the store's mapped file, good while the commit is leased. A table stays
    as stored: its rows are rounded when they are looked up.

    Raises:
        CorruptionError: its bytes are not those that were committed.
    """
    view = place.pinned.read(place.shard, again=not keep)
    is_table = place.key.role == "table"
    weights = device.bring_in(view, None if is_table else dtype)
    if not keep or not device.is_host:
        return weights
    if is_table:
        return {name: tensor.clone() for name, tensor in weights.items()}
    return {name: products.pack(tensor) for name, tensor in weights.items()}


def kept_bytes(place: StagePlace, dtype: torch.dtype) -> int:
    """Give the memory that a stage takes when it stays."""
    if place.key.role == "table":
        return place.pinned.size_bytes(place.shard)
    return place.values * dtype.itemsize


def weights_bytes(weights: Weights) -> int:
    """Give the memory of a stage's parameters."""
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in weights.values())


def _role(index: int, count: int) -> Role:
    if index == 0:
        return "table"
    if index == count - 1:
        return "head"
    return "norm" if index == count - 2 else "block"
