"""Writing a GGUF file a tile at a time, and reading it back against the store.

Owns the order of the parts of the file and the conversion of values. Knows nothing of where weights
or tokenizers come from. Memory is one shard of the store, one tensor where its rows are laid out
anew, and one tile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGUFValueType
from numpy.typing import NDArray
from torch import Tensor

from export.gguf_layout import GgufTensor, halved, interleaved
from export.reference_logits import ReadShard
from export.verify import VerificationError

TILE_ELEMENTS = 1 << 20
QUANTIZATION_VERSION = 2
Values = NDArray[Any]
_FORMS: Mapping[str, gguf.GGMLQuantizationType] = MappingProxyType(
    {
        "f32": gguf.GGMLQuantizationType.F32,
        "f16": gguf.GGMLQuantizationType.F16,
        "bf16": gguf.GGMLQuantizationType.BF16,
        "q8_0": gguf.GGMLQuantizationType.Q8_0,
    }
)
_FILE_TYPES: Mapping[str, gguf.LlamaFileType] = MappingProxyType(
    {
        "f32": gguf.LlamaFileType.ALL_F32,
        "f16": gguf.LlamaFileType.MOSTLY_F16,
        "bf16": gguf.LlamaFileType.MOSTLY_BF16,
        "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Extra:
    """A tensor that is no weight, such as rotary factors."""

    name: str
    values: Tensor


def file_type(form: str) -> int:
    """Give the number by which a file says what most of its tensors are."""
    return int(_FILE_TYPES[form])


def tensor_bytes(tensor: GgufTensor) -> int:
    """Give a tensor's size in the file."""
    block, size = gguf.GGML_QUANT_SIZES[_FORMS[tensor.form]]
    elements = 1
    for length in tensor.shape:
        elements *= length
    return elements // block * size


def write_file(
    path: Path,
    architecture: str,
    settle: Callable[[gguf.GGUFWriter], None],
    tensors: Sequence[GgufTensor],
    extras: Sequence[Extra],
    read: ReadShard,
) -> str:
    """Write everything; `settle` adds the settings. Gives the file's sha256."""
    writer = gguf.GGUFWriter(path, architecture)
    try:
        settle(writer)
        for extra in extras:
            size = extra.values.numel() * 4
            writer.add_tensor_info(extra.name, extra.values.shape, np.dtype(np.float32), size)
        for tensor in tensors:
            writer.add_tensor_info(
                *(tensor.name, tensor.shape, np.dtype(np.float32), tensor_bytes(tensor)),
                raw_dtype=_FORMS[tensor.form],
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None, "the header opened it"
        [out] = writer.fout
        writer.write_padding(out, out.tell())
        for extra in extras:
            writer.write_padding(out, out.write(extra.values.numpy().tobytes()))
        for tensor, values in _in_order(tensors, read):
            laid = interleaved(values, tensor.heads)
            size = sum(out.write(tile) for tile in _converted(laid, tensor.form))
            assert size == tensor_bytes(tensor), tensor
            writer.write_padding(out, size)
    finally:
        writer.close()
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check_file(path: Path, tensors: Sequence[GgufTensor], read: ReadShard) -> None:
    """Read the file back and compare every tensor with the store; VerificationError names one.

    The layout is undone and the values are decoded, so that a wrong one does not meet itself: what
    is compared is a weight of the store, rounded to the file's form.
    """
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for tensor, values in _in_order(tensors, read):
        stored = found.get(tensor.name)
        if stored is None or tuple(int(n) for n in reversed(stored.shape)) != tensor.shape:
            raise VerificationError(f"{path}: tensor {tensor.name} is missing, or of another shape")
        if not _is_equal(stored, tensor, values):
            raise VerificationError(
                f"{path}: tensor {tensor.name} is not {tensor.shard} {tensor.tensor} of the store"
            )


def _is_equal(stored: gguf.ReaderTensor, tensor: GgufTensor, values: Tensor) -> bool:
    """Compare by tiles of rows; where rows were laid out anew, all at once."""
    rows = len(values) if tensor.heads or values.ndim == 1 else _tile_rows(values)
    data = stored.data.reshape(len(values), -1) if values.ndim > 1 else stored.data
    for start in range(0, len(values), rows):
        tile = values[start : start + rows]
        read = gguf.dequantize(np.array(data[start : start + rows]), stored.tensor_type)
        theirs = halved(torch.from_numpy(read).reshape(tile.shape), tensor.heads)
        if not torch.equal(theirs, rounded(tile, tensor.form)):
            return False
    return True


def rounded(values: Tensor, form: str) -> Tensor:
    """Give fp32 values as the form holds them."""
    if form == "q8_0":
        rows = values.float().numpy()
        return torch.from_numpy(gguf.dequantize(gguf.quantize(rows, _FORMS[form]), _FORMS[form]))
    dtypes = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    return values.to(dtypes[form]).float()


def setting(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a setting whose key the writer has no method for."""
    kinds: dict[type, GGUFValueType] = {
        bool: GGUFValueType.BOOL,
        int: GGUFValueType.UINT32,
        float: GGUFValueType.FLOAT32,
        str: GGUFValueType.STRING,
    }
    writer.add_key_value(key, value, kinds[type(value)])


def _in_order(
    tensors: Sequence[GgufTensor], read: ReadShard
) -> Iterator[tuple[GgufTensor, Tensor]]:
    name = ""
    shard: Mapping[str, Tensor] = {}
    for tensor in tensors:
        if tensor.shard != name:
            shard = {}  # let go of the old one first
            name, shard = tensor.shard, read(tensor.shard)
        yield tensor, shard[tensor.tensor]


def _converted(values: Tensor, form: str) -> Iterator[memoryview]:
    rows = values.reshape(-1, values.shape[-1])
    step = _tile_rows(rows)
    for start in range(0, len(rows), step):
        tile = rows[start : start + step].contiguous()
        if form == "q8_0":
            data = gguf.quantize(tile.float().numpy(), _FORMS[form])
        else:
            dtypes = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
            data = tile.to(dtypes[form]).view(torch.uint8).numpy()
        flat: Values = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        yield flat.data


def _tile_rows(values: Tensor) -> int:
    return max(1, TILE_ELEMENTS // values.shape[-1])
