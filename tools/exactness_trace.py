"""What a training step left, in a form that two ways of training can be compared by.

Owns the record of a step and the comparison. Knows nothing of how steps are made. Invariant: two
equal tensors have equal digests, and those of different bytes, shapes or dtypes do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """One committed step; `batch` counts the batches that were consumed, skipped ones too."""

    step: int
    batch: int
    learning_rate: float
    loss: float
    grad_norm: float
    clip_scale: float
    loss_scale: float
    shard_norms: Mapping[str, float]
    tensors: Mapping[str, str]


Trace = Sequence[StepTrace]


def digest_of(array: NDArray[Any]) -> str:
    """Digest an array's dtype, shape and bytes."""
    digest = xxhash.xxh3_128(f"{array.dtype.str} {array.shape} ".encode())
    digest.update(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
    return digest.hexdigest()


def digests_of(arrays: Mapping[str, NDArray[Any]]) -> dict[str, str]:
    """Digest every array."""
    return {name: digest_of(array) for name, array in arrays.items()}


def differences(mine: Trace, theirs: Trace) -> list[str]:
    """List every value of every step that is not the same bits, named by step."""
    if len(mine) != len(theirs):
        return [f"{len(mine)} steps, and {len(theirs)} in the other run"]
    return [what for one, other in zip(mine, theirs, strict=True) for what in _unlike(one, other)]


def unlike_tensors(step: int, mine: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[str]:
    """Name the entries of two mappings that differ, or that one of them lacks."""
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            yield f"step {step}: {name}"


def _unlike(one: StepTrace, other: StepTrace) -> Iterator[str]:
    for field in fields(StepTrace):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if field.name == "tensors":
            yield from unlike_tensors(one.step, left, right)
        elif left != right:
            yield f"step {one.step}: {field.name} is {left!r}, and {right!r} in the other run"


def shows_nothing(trace: Trace, *, clip: str, dtype: str) -> list[str]:
    """Say what a trace owes and lacks: a step that was clipped, a batch that overflowed."""
    found = []
    if clip != "none" and min(each.clip_scale for each in trace) >= 1.0:
        found.append("clipping never happened")
    if dtype == "fp16" and trace[-1].batch == trace[-1].step:
        found.append("no batch overflowed")
    if len({each.loss for each in trace}) < len(trace):
        found.append("two steps have one loss")
    return found
