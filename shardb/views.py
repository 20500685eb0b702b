"""Views of shards: tensors of an object in memory, without a copy.

Owns the classes that clients read from and write into. A `ShardView` is immutable; a `StagedShard`
is the writable image of a shard of the next commit until it is sealed. BF16 and 8-bit floats, which
numpy does not have, appear as unsigned integers of their width.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from shardb.buffers import Bytes
from shardb.errors import NotFoundError, UsageError
from shardb.layout import Layout, TensorSpec
from shardb.refs import no_such

NUMPY_TYPES: dict[str, str] = {
    "BOOL": "|b1",
    "U8": "|u1",
    "I8": "|i1",
    "F8_E4M3": "|u1",
    "F8_E5M2": "|u1",
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<f2",
    "BF16": "<u2",
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
    "C64": "<c8",
}
SPEC_TYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
}
Array = NDArray[Any]


class TensorImage:
    """Tensors over the bytes of one object."""

    def __init__(self, name: str, layout: Layout, image: Bytes) -> None:
        assert len(image) == layout.size_bytes
        self.name = name
        self.layout = layout
        self.image = image

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self.layout.specs

    @property
    def bytes(self) -> int:
        """Size of the object in bytes, header included."""
        return self.layout.size_bytes

    def raw(self, tensor: str) -> Bytes:
        """The bytes of one tensor, uint8 [bytes]; NotFoundError when there is no such tensor."""
        spec = self.layout.specs.get(tensor)
        if spec is None:
            named = no_such("tensor", tensor, self.layout.specs)
            raise NotFoundError(f"shard {self.name!r}: {named}")
        start = self.layout.offsets[tensor]
        return self.image[start : start + spec.bytes]

    def array(self, tensor: str) -> Array:
        """One tensor as an array of its shape; it shares the image's memory."""
        raw = self.raw(tensor)
        spec = self.layout.specs[tensor]
        return raw.view(NUMPY_TYPES[spec.dtype]).reshape(spec.shape)

    def arrays(self) -> dict[str, Array]:
        """Every tensor by name, in file order."""
        return {name: self.array(name) for name in self.layout.specs}


class ShardView(TensorImage):
    """An immutable shard of a commit, or one staged and sealed in this transaction.

    It is valid while the read view or transaction that gave it is open.
    """

    def __init__(self, name: str, layout: Layout, image: Bytes, digest: str | None) -> None:
        super().__init__(name, layout, image)
        self.digest = digest


class StagedShard(TensorImage):
    """The writable image of a shard of the next commit.

    `mapping` is the image's file in a store in memory. It stays where it is for the life of the
    store, through every rename: a client may page-lock it, once.
    """

    def __init__(
        self,
        name: str,
        layout: Layout,
        image: Bytes,
        seal: Callable[[StagedShard], None],
        *,
        mapping: mmap.mmap | None = None,
        fill: Callable[[StagedShard, int], None] | None = None,
    ) -> None:
        super().__init__(name, layout, image)
        self._seal = seal
        self._fill = fill
        self.sealed = False
        self.mapping = mapping

    def filled(self, size_bytes: int) -> None:
        """Say that the image is complete up to here, not only its header.

        The caller must not change it there any more. A store in memory digests it in the background
        while the rest is filled; others have no use for it.
        """
        if self._fill is not None and not self.sealed:
            self._fill(self, size_bytes)

    def seal(self) -> None:
        """Say that the image is complete: from here on it is written out in the background.

        The caller must not write into it any more until the commit has returned. Arrays taken from
        here on are read-only. An image whose earlier arrays outlive the commit is not kept in
        memory (a mapped one is copied), so let them go.
        """
        if not self.sealed:
            self.sealed = True
            self._seal(self)


def specs_of(tensors: Mapping[str, Array]) -> dict[str, TensorSpec]:
    """Specifications of numpy arrays; UsageError for a data type an object cannot hold."""
    specs: dict[str, TensorSpec] = {}
    for name, array in tensors.items():
        dtype = SPEC_TYPES.get(array.dtype.name)
        if dtype is None:
            raise UsageError(
                f"tensor {name!r}: numpy data type {array.dtype} cannot be stored; use one of "
                f"{', '.join(SPEC_TYPES)}"
            )
        specs[name] = TensorSpec(dtype=dtype, shape=tuple(array.shape))
    return specs
