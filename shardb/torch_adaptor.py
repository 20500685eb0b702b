"""The one module of the store that knows torch: shard views as tensors, tensors as shards.

Zero-copy both ways. The only place inside `shardb` where torch is imported, and nothing of the
store imports it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch

from shardb.errors import UsageError
from shardb.layout import TensorSpec
from shardb.transaction import Transaction
from shardb.views import TensorImage

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def tensors(view: TensorImage) -> dict[str, torch.Tensor]:
    """Every tensor of a view, sharing its memory.

    Tensors of an immutable view must not be written to: torch has no read-only tensors, and a write
    to a mapped object ends the process.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        image = torch.frombuffer(view.image.data, dtype=torch.uint8)
    found: dict[str, torch.Tensor] = {}
    for name, spec in view.specs.items():
        start = view.layout.offsets[name]
        raw = image[start : start + spec.bytes]
        found[name] = raw.view(DTYPES[spec.dtype]).reshape(spec.shape)
    return found


def specs(named: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    """Specifications of tensors; UsageError for a data type an object cannot hold."""
    found: dict[str, TensorSpec] = {}
    for name, tensor in named.items():
        if tensor.dtype not in NAMES:
            raise UsageError(f"tensor {name!r}: data type {tensor.dtype} cannot be stored")
        found[name] = TensorSpec(dtype=NAMES[tensor.dtype], shape=tuple(tensor.shape))
    return found


def write(
    transaction: Transaction,
    name: str,
    named: Mapping[str, torch.Tensor],
    *,
    trainable: bool = True,
) -> None:
    """Stage a shard from tensors on any device, copying them, and seal it."""
    shard = transaction.stage(name, specs(named), trainable=trainable)
    with transaction.filling(name):
        targets = tensors(shard)
        for tensor_name, tensor in named.items():
            targets[tensor_name].copy_(tensor.detach())
    shard.seal()
