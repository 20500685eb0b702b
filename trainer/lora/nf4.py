"""A frozen base in NF4: its blocks' matrices in four bits, quantised once, shard by shard.

Owns every use of `bitsandbytes` (extra `nf4`): packing, its state as tensors of an object, and the
product with a packed weight. Double quantisation is on. Knows nothing of steps. Invariants: what is
streamed are the bytes that a resident model quantised by the same library holds; both code tables
are the library's own and are checked, never assumed.

Format of `nf4/<stage>`: for each matrix `W` of the block `W.nf4` (U8, two values a byte),
`W.nf4_absmax` (U8, one for 64 values), `W.nf4_nested` (F32, one for 256 of those), `W.nf4_offset`
(F32) and `W.nf4_form` (the name of the dtype it was made of); everything else as it was imported.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shardb import Transaction, torch_adaptor
from shardb.extras import install
from shardb.views import ShardView, TensorImage
from trainer.errors import InputError
from trainer.lora.ledger import Product
from trainer.lora.targets import linear_modules
from trainer.model.packed import (
    ABSMAX,
    BLOCK_VALUES,
    FORM,
    MARK,
    NESTED,
    NESTED_VALUES,
    OFFSET,
    PREFIX,
    quant_state,
)
from trainer.model.stages import Stage

TABLE_VALUES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """How much a base took: values of its matrices, and bytes that stand for them."""

    values: int
    bytes: int

    @property
    def bytes_a_value(self) -> float:
        """Give the bytes of a parameter."""
        return self.bytes / self.values


def library() -> Any:
    """Give `bitsandbytes.functional`; InputError where it is not installed."""
    try:
        return importlib.import_module("bitsandbytes.functional")
    except ImportError as error:
        raise InputError(
            f"--base-quant nf4 needs bitsandbytes ({error}): {install('nf4')}"
        ) from error


def quantise(
    stage: Stage, tensors: Mapping[str, Tensor], device: torch.device
) -> dict[str, Tensor]:
    """Give a block's tensors with its matrices packed, one after the other, by `device`."""
    matrices = {f"{module}.weight" for module in linear_modules(stage)}
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in matrices:
            packed = _packed(name, tensor.to(device))
            found |= {key: value.to("cpu") for key, value in packed.items()}
        else:
            found[name] = tensor
    return found


def _packed(name: str, weight: Tensor) -> dict[str, Tensor]:
    packed, state = library().quantize_4bit(
        weight.contiguous(), blocksize=BLOCK_VALUES, compress_statistics=True, quant_type="nf4"
    )
    _check_tables(state)
    form = torch_adaptor.NAMES[weight.dtype].encode()
    return {
        name + MARK: packed,
        name + MARK + ABSMAX: state.absmax,
        name + MARK + NESTED: state.state2.absmax,
        name + MARK + OFFSET: state.offset.reshape(1),
        name + MARK + FORM: torch.frombuffer(bytearray(form), dtype=torch.uint8),
    }


def _check_tables(state: Any) -> None:
    """One copy of each table serves every weight, as long as every weight has the same."""
    tables = code_tables(state.code.device)
    assert torch.equal(state.code, tables[0]), "this weight has another table of values"
    assert torch.equal(state.state2.code, tables[1]), "this weight has another table of scales"
    assert (state.blocksize, state.state2.blocksize) == (BLOCK_VALUES, NESTED_VALUES)


@lru_cache(maxsize=8)
def code_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Give the library's tables: of 4-bit values [16], of their scales [256]."""
    functional = library()
    values = functional.get_4bit_type("nf4", device=device)
    scales = functional.create_dynamic_map().to(device)
    assert values.shape == (TABLE_VALUES,)
    return values, scales


def holds(weights: Mapping[str, Tensor]) -> bool:
    """Say whether some of a block's weights are packed."""
    return any(MARK in name for name in weights)


def computes_in(view: TensorImage, dtype: torch.dtype) -> bool:
    """Say whether a block was packed from the dtype that computes.

    Then one unpacked form serves both ways; otherwise the library multiplies with another one
    forward than back.
    """
    forms = [view.raw(name).tobytes() for name in view.specs if name.endswith(MARK + FORM)]
    return all(form == torch_adaptor.NAMES[dtype].encode() for form in forms)


def unpacked(
    stage: Stage,
    packed: Mapping[str, Tensor],
    dtype: torch.dtype,
    places: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Give a block's weights as they compute, in `places`, or in memory of their own."""
    device = next(iter(packed.values())).device
    tables = code_tables(device)
    found = {}
    for name, parameter in stage.parameters.items():
        place = None if places is None else places[name]
        if name + MARK in packed:
            state = quant_state(
                library(), name + MARK, torch.Size(parameter.shape), packed, tables, dtype
            )
            # On a processor the library has no way of writing to a place.
            out = None if device.type == "cpu" else place
            values = library().dequantize_4bit(packed[name + MARK], state, out=out)
            found[name] = values if place is None or place is out else place.copy_(values)
        else:
            found[name] = packed[name].clone() if place is None else place.copy_(packed[name])
    return found


def products(
    stage: Stage, weights: Mapping[str, Tensor], tables: tuple[Tensor, Tensor]
) -> dict[str, Product]:
    """Give what multiplies by each packed weight of a block, by the weight's name."""
    parameters = stage.parameters
    return {
        name: _product(name, tuple(parameters[name].shape), weights, tables)
        for name in (f"{module}.weight" for module in linear_modules(stage))
        if name + MARK in weights
    }


def _product(
    name: str,
    shape: tuple[int, ...],
    weights: Mapping[str, Tensor],
    tables: tuple[Tensor, Tensor],
) -> Product:
    library_package = importlib.import_module("bitsandbytes")
    key = name + MARK
    form = torch_adaptor.DTYPES[bytes(weights[key + FORM].tolist()).decode()]
    state = quant_state(library(), key, torch.Size(shape), weights, tables, form)

    def multiply(x: Tensor, bias: Tensor | None) -> Tensor:
        output: Tensor = library_package.matmul_4bit(x, weights[key], quant_state=state, bias=bias)
        return output

    def back(gradient: Tensor, packed: Tensor) -> Tensor:
        matrix = library().dequantize_4bit(packed, state)
        return torch.matmul(gradient, matrix.to(gradient.dtype))

    return Product(multiply=multiply, back=back, saved=weights[key], width=shape[0])


def stage_quantised(
    txn: Transaction, stages: list[Stage], known: Mapping[str, object], device: torch.device
) -> Packed:
    """Stage the blocks of an imported base in NF4, frozen, one after the other, made by `device`.

    A block that the commit has already is left as it is.
    """
    values = size = 0
    for stage in stages:
        matrices = {f"{module}.weight" for module in linear_modules(stage)}
        if not matrices:
            continue
        name = PREFIX + stage.name
        if name not in known:
            tensors = torch_adaptor.tensors(txn.read(f"params/{stage.name}"))
            torch_adaptor.write(txn, name, quantise(stage, tensors, device), trainable=False)
        values += sum(math.prod(stage.parameters[each].shape) for each in matrices)
        size += packed_bytes(txn.read(name))
    return Packed(values=values, bytes=size)


def packed_bytes(view: ShardView) -> int:
    """Give the bytes of a shard's packed weights and their state."""
    return sum(spec.bytes for name, spec in view.specs.items() if MARK in name)


def packed_shapes(stage: Stage) -> dict[str, tuple[tuple[int, ...], int]]:
    """Give shape and bytes an element of a block's tensors as they are streamed."""
    matrices = {f"{module}.weight" for module in linear_modules(stage)}
    found: dict[str, tuple[tuple[int, ...], int]] = {}
    for name, parameter in stage.parameters.items():
        if name not in matrices:
            found[name] = (parameter.shape, 0)
            continue
        count = parameter.shape[0] * parameter.shape[1]
        blocks = -(-count // BLOCK_VALUES)
        found[name + MARK] = ((-(-count // 2), 1), 1)
        found[name + MARK + ABSMAX] = ((blocks,), 1)
        found[name + MARK + NESTED] = ((-(-blocks // NESTED_VALUES),), 4)
        found[name + MARK + OFFSET] = ((1,), 4)
        found[name + MARK + FORM] = ((4,), 1)
    return found
