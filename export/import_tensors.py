"""The bytes of one tensor, from its file into the image of a shard.

Owns reading in pieces and the change of form. Knows nothing of names or models. Invariants: without
a change of form not a bit changes; a value that another form cannot hold is never stored.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor

from export.import_files import StoredTensor
from shardb.torch_adaptor import DTYPES, tensors
from shardb.views import StagedShard
from trainer.errors import InputError

CHUNK_BYTES = 16 << 20
FORMS = MappingProxyType({"fp32": "F32", "bf16": "BF16", "fp16": "F16"})


def stored_dtype(tensor: StoredTensor, dtype: str | None) -> str:
    """Give the form in which a tensor is stored: its own, or the one asked for."""
    return tensor.spec.dtype if dtype is None else FORMS[dtype]


class Filler:
    """Fills shards from files; counts what a change of form lost."""

    def __init__(self) -> None:
        self._flushed: dict[str, int] = {}

    def notes(self) -> tuple[str, ...]:
        """Say which values became zero."""
        return tuple(
            f"{name}: {count} values are too small for the new form and became 0"
            for name, count in self._flushed.items()
        )

    def fill(self, name: str, source: StoredTensor, staged: StagedShard, tensor: str) -> None:
        """Read a tensor of a package into its place; InputError for a truncated file."""
        with source.path.open("rb", buffering=0) as file:
            file.seek(source.offset)
            if staged.specs[tensor].dtype == source.spec.dtype:
                target = staged.raw(tensor).data
                for start in range(0, len(target), CHUNK_BYTES):
                    _read(file, target[start : start + CHUNK_BYTES], source)
                return
            target_N = tensors(staged)[tensor].flatten()
            self._convert(name, file, source, target_N)

    def _convert(self, name: str, file: object, source: StoredTensor, target_N: Tensor) -> None:
        dtype = DTYPES[source.spec.dtype]
        count = CHUNK_BYTES // dtype.itemsize
        piece = bytearray(min(CHUNK_BYTES, source.spec.bytes))
        for start in range(0, len(target_N), count):
            part = target_N[start : start + count]
            view = memoryview(piece)[: len(part) * dtype.itemsize]
            _read(file, view, source)
            values = torch.frombuffer(view, dtype=dtype)
            part.copy_(values)
            lost = int((torch.isfinite(values) & ~torch.isfinite(part)).sum())
            if lost:
                raise InputError(
                    f"{source.path}: {name} holds {lost} values that {target_N.dtype} cannot hold"
                    f" (such as {float(values[~torch.isfinite(part)][0]):g}): leave --dtype out, or"
                    " give bf16 or fp32; nothing was imported"
                )
            flushed = int(((values != 0) & (part == 0)).sum())
            if flushed:
                self._flushed[name] = self._flushed.get(name, 0) + flushed


def _read(file: object, target: memoryview, source: StoredTensor) -> None:
    """Fill `target` from where the file is."""
    done = 0
    while done < len(target):
        count = file.readinto(target[done:])  # type: ignore[attr-defined]
        if not count:
            raise InputError(
                f"{source.path}: ended early: it was cut short while it was read; fetch it again"
            )
        done += count
