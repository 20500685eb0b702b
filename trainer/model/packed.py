"""A frozen base in four bits as whoever merges adapters reads it: unpacked, a block at a time.

Owns that reading; `trainer.lora.nf4` has the format and makes it. Knows nothing of packages. The
values are exact, in fp32; training multiplied with them rounded to the dtype that computes. Needs
`bitsandbytes` (extra `nf4`); InputError says so where it is missing.
"""

from __future__ import annotations

import importlib
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor

from shardb.extras import install
from trainer.errors import InputError

PREFIX, MARK = "nf4/", ".nf4"
FORM, ABSMAX, NESTED, OFFSET = "_form", "_absmax", "_nested", "_offset"
BLOCK_VALUES, NESTED_VALUES = 64, 256


def packed_shard(shards: Container[str], shard: str) -> str | None:
    """Give the shard in the place of `params/<stage>`, where a commit has one that is packed."""
    kind, _, stage = shard.partition("/")
    return PREFIX + stage if kind == "params" and PREFIX + stage in shards else None


def unpacked(packed: Mapping[str, Tensor], imported: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give a block's weights: matrices from their packed form in fp32, all else as imported."""
    library = packed_library()
    tables = library.get_4bit_type("nf4", device="cpu"), library.create_dynamic_map()
    found = {}
    for name, tensor in imported.items():
        key = name + MARK
        if key not in packed:
            found[name] = tensor
            continue
        state = quant_state(library, key, tensor.shape, packed, tables, torch.float32)
        found[name] = library.dequantize_4bit(packed[key], state)
    return found


def quant_state(
    library: Any,
    key: str,
    shape: torch.Size,
    packed: Mapping[str, Tensor],
    tables: tuple[Tensor, Tensor],
    dtype: torch.dtype,
) -> Any:
    """Give the library's own description of a packed weight.

    tables: of 4-bit values [16], and of their scales [256]; dtype: what it is unpacked to.
    """
    nested = library.QuantState(
        absmax=packed[key + NESTED],
        code=tables[1],
        blocksize=NESTED_VALUES,
        dtype=torch.float32,
    )
    return library.QuantState(
        absmax=packed[key + ABSMAX],
        shape=shape,
        code=tables[0],
        blocksize=BLOCK_VALUES,
        quant_type="nf4",
        dtype=dtype,
        offset=packed[key + OFFSET].reshape(()),
        state2=nested,
    )


def packed_library() -> Any:
    """Give what unpacks; InputError where it is not installed."""
    try:
        return importlib.import_module("bitsandbytes.functional")
    except ImportError as error:
        raise InputError(
            f"the base of these adapters is in nf4, which takes bitsandbytes ({error}):"
            f" {install('nf4')}, or merge with `export-hf --merge-into imported`"
        ) from error
