"""A stage's parameters as the sweep computes with them.

Owns the names of stages, the roles that a shard has (a table that is looked up, a block, a head),
and the form it is kept in: `stored`, as it lies in the store; `packed` for the processor, in the
dtype of computing; `plain`, in that dtype and able to be looked up, for layers of transformers and
for a shard that is table and head at once, which so is read and kept once. Knows nothing of when
they are brought in. Invariant: parameters that stay resident are a copy of their own, which neither
the store's files nor its leases touch any more.
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
from shardb import torch_adaptor
from shardb.errors import UsageError
from shardb.views import ShardView
from trainer.device import Device
from trainer.model.adapters import adapter_shard, with_adapters
from trainer.model.config import ModelConfig
from trainer.model.packed import packed_library, packed_shard, unpacked
from trainer.model.stages import build_head, build_trunk

Role = Literal["table", "block", "norm", "head"]
Form = Literal["stored", "packed", "plain"]
Weights = Mapping[str, Tensor]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class StageKey:
    """One stage of any commit: equal digests in equal forms are equal weights."""

    digest: str
    form: Form


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlace:
    """A stage of one model: where it is read from, what it is, how many numbers it has."""

    pinned: PinnedModel
    shard: str
    key: StageKey
    role: Role
    index: int
    values: int


def stage_places(pinned: PinnedModel) -> list[StagePlace]:
    """Give every stage of a model in forward order, the head last.

    Raises:
        UsageError: the commit has no such shards, so its model is of another kind.
        InputError: its layers are those of transformers, which is not installed or is too old, or
            its base is packed, and what unpacks it is not installed.
    """
    stages = [*build_trunk(pinned.config), build_head(pinned.config)]
    places = []
    for index, stage in enumerate(stages):
        shard = f"params/{stage.name}"
        if shard not in pinned.commit.shards:
            raise UsageError(
                f"step {pinned.commit.step} has no shard {shard}: its model is not one of this"
                " project's own geometry, and cannot be served"
            )
        if packed_shard(pinned.commit.shards, shard) is not None:
            packed_library()
        role = _role(index, len(stages))
        key = StageKey(digest=_digest(pinned, shard), form=_form(role, pinned.config))
        values = sum(math.prod(each.shape) for each in stage.parameters.values())
        places.append(
            StagePlace(pinned=pinned, shard=shard, key=key, role=role, index=index, values=values)
        )
    return places


def bring_weights(
    place: StagePlace,
    device: Device,
    dtype: torch.dtype,
    products: RowProducts,
    *,
    keep: bool,
) -> Weights:
    """Read and check a stage; with `keep` as a copy of its own, in the form that its key names.

    Without it they may be the store's mapped file, good while the commit is leased. What stays as
    stored is a table: its rows are rounded when they are looked up.

    Raises:
        CorruptionError: its bytes are not those that were committed.
    """
    view = place.pinned.read(place.shard, again=not keep)
    form = place.key.form
    beside = adapter_shard(place.pinned.commit.shards, place.shard)
    if beside is not None:
        weights = _merged(place, view, beside, device, dtype)
    else:
        weights = device.bring_in(view, None if form == "stored" else dtype)
    if not keep or not device.is_host:
        return weights
    if form == "packed":
        return {name: products.pack(tensor) for name, tensor in weights.items()}
    return {name: tensor.clone() for name, tensor in weights.items()}


def _digest(pinned: PinnedModel, shard: str) -> str:
    """Name a stage's weights: those of its shard, and of adapters that are merged into them."""
    shards = pinned.commit.shards
    base = packed_shard(shards, shard) or shard
    beside = adapter_shard(shards, shard)
    return pinned.digest(base) + (f"+{pinned.digest(beside)}" if beside is not None else "")


def _merged(
    place: StagePlace, view: ShardView, beside: str, device: Device, dtype: torch.dtype
) -> Weights:
    """Give a block with its adapters merged in, in fp32 before it is rounded to `dtype`.

    Beside a packed base it is that base, unpacked, which the adapters were trained on.
    """
    lora = place.pinned.lora
    assert lora is not None, "a commit with adapters says what they are"
    base: Weights = torch_adaptor.tensors(view)
    packed = packed_shard(place.pinned.commit.shards, place.shard)
    if packed is not None:
        base = unpacked(torch_adaptor.tensors(place.pinned.read(packed)), base)
    weights = with_adapters(base, place.pinned.read(beside), lora)
    return {name: device.to_device(tensor).to(dtype) for name, tensor in weights.items()}


def kept_bytes(place: StagePlace, dtype: torch.dtype) -> int:
    """Give the memory that a stage takes when it stays."""
    if place.key.form == "stored":
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


def _form(role: Role, config: ModelConfig) -> Form:
    if config.hf_config:
        return "plain"
    is_shared = config.tied_embeddings and role in ("table", "head")
    return "plain" if is_shared else "stored" if role == "table" else "packed"
