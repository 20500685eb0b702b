"""What a store keeps of the package that it was imported from.

Owns the shards `meta/source` (the original configuration and where each tensor went) and
`meta/tokenizer_files` (the tokenizer's other files, byte for byte). Knows nothing of how they are
found or what is made of them. Invariant: both depend on the package's content alone, not on time or
place, so equal packages give equal objects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from shardb import ReadView, Transaction
from shardb.errors import FormatError
from trainer.model.stored import SOURCE_SHARD, TOKENIZER_FILES_SHARD

FORMAT = 1
_TENSOR = "json"


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceTensor:
    """One tensor of the package: its name there, its place in the store, its form there.

    dtype: in safetensors' names; the store's own differs where the import converted.
    """

    name: str
    shard: str
    tensor: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourcePackage:
    """A package as it was read.

    config, generation_config: the files' content, the second None where there was none.
    tensors: every tensor of the package that has a place of its own, sorted by name.
    aliases: names under which the package holds another tensor's values once more, such as a tied
        `lm_head.weight`; each names the tensor that it equals.
    """

    config: Mapping[str, Any]
    generation_config: Mapping[str, Any] | None = None
    tensors: tuple[SourceTensor, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def model_type(self) -> str:
        """Give the family's name as the configuration has it."""
        return str(self.config["model_type"])

    def to_bytes(self) -> bytes:
        """Give canonical JSON: equal packages are equal bytes."""
        values = {**asdict(self), "format": FORMAT}
        return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> SourcePackage:
        """Read what `to_bytes` gave; FormatError when a newer version wrote it."""
        values = json.loads(data)
        if values.pop("format") != FORMAT:
            raise FormatError(f"{SOURCE_SHARD} was written by a newer version: update to read it")
        tensors = tuple(
            SourceTensor(**{**entry, "shape": tuple(entry["shape"])})
            for entry in values.pop("tensors")
        )
        return cls(tensors=tensors, **values)


def read_source(view: ReadView) -> SourcePackage | None:
    """Read the package that a commit's weights came from; None where they were not imported."""
    if SOURCE_SHARD not in view.names():
        return None
    return SourcePackage.from_bytes(view.read(SOURCE_SHARD).array(_TENSOR).tobytes())


def read_tokenizer_files(view: ReadView) -> dict[str, bytes]:
    """Read the tokenizer's files other than tokenizer.json, by name; empty where there are none."""
    if TOKENIZER_FILES_SHARD not in view.names():
        return {}
    shard = view.read(TOKENIZER_FILES_SHARD)
    return {name: shard.array(name).tobytes() for name in sorted(shard.specs)}


def write_source(
    txn: Transaction, source: SourcePackage, tokenizer_files: Mapping[str, bytes]
) -> None:
    """Stage both shards; they are frozen: training carries them from commit to commit."""
    data = np.frombuffer(source.to_bytes(), dtype=np.uint8)
    txn.write(SOURCE_SHARD, {_TENSOR: data}, trainable=False)
    if tokenizer_files:
        arrays = {n: np.frombuffer(d, dtype=np.uint8) for n, d in tokenizer_files.items()}
        txn.write(TOKENIZER_FILES_SHARD, arrays, trainable=False)
