"""Values that are not finite, counted in constant memory.

Owns the reading of a tensor's bytes and the counting. Knows nothing of formats: a place in a file,
a form and a number of bytes are enough. Memory is one chunk. In every IEEE form a value whose
exponent has all bits set is NaN where the fraction has a bit, else infinite.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from export.doctor_findings import Finding, Place
from export.import_files import StoredTensor

CHUNK_BYTES = 4 << 20
TOLD_MAX = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """Where exponent and fraction lie.

    stride, in items: what is a scale among other bytes; elements: how many values have one scale.
    """

    item: str
    exponent: int
    fraction: int
    stride: int = 1
    elements: int = 1


FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "F64": Form(item="<u8", exponent=0x7FF << 52, fraction=(1 << 52) - 1),
        "F32": Form(item="<u4", exponent=0xFF << 23, fraction=(1 << 23) - 1),
        "BF16": Form(item="<u2", exponent=0xFF << 7, fraction=(1 << 7) - 1),
        "F16": Form(item="<u2", exponent=0x7C00, fraction=0x03FF),
        # Blocks of 32: an fp16 scale first, then whole numbers.
        "Q8_0": Form(
            item="<u2", exponent=0x1F << 10, fraction=(1 << 10) - 1, stride=17, elements=32
        ),
        "Q4_0": Form(
            item="<u2", exponent=0x1F << 10, fraction=(1 << 10) - 1, stride=9, elements=32
        ),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """Where a tensor's bytes lie."""

    name: str
    path: Path
    offset: int
    bytes: int
    form: str


def extents_of(tensors: Mapping[str, StoredTensor]) -> dict[str, Extent]:
    """Give the place of each tensor's bytes, by its name."""
    return {
        name: Extent(
            name=name,
            path=tensor.path,
            offset=tensor.offset,
            bytes=tensor.spec.bytes,
            form=tensor.spec.dtype,
        )
        for name, tensor in tensors.items()
    }


def not_finite(extents: Iterable[Extent]) -> tuple[list[Finding], int]:
    """Count NaN and infinite values; gives findings, and how many values were looked at."""
    findings: list[Finding] = []
    unread: dict[str, int] = {}
    looked = more = 0
    for extent in extents:
        form = FORMS.get(extent.form)
        if form is None:
            unread[extent.form] = unread.get(extent.form, 0) + 1
            continue
        nan, infinite, count = _count(extent, form)
        looked += count * form.elements
        if not nan and not infinite:
            continue
        if len(findings) < TOLD_MAX:
            findings.append(_finding(extent, nan, infinite, count))
        else:
            more += 1
    if more:
        what = f"{more} more tensors have values that are not finite"
        findings.append(Place(file="").error("", what, "see the first ones"))
    for name, tensors in sorted(unread.items()):
        what = f"{tensors} tensors of form {name} were not searched for NaN"
        findings.append(Place(file="").note("", what))
    return findings, looked


def all_zero(extent: Extent) -> bool:
    """Say whether every byte of a tensor is zero."""
    return not any(np.frombuffer(part, dtype=np.uint8).any() for part in _parts(extent))


def _count(extent: Extent, form: Form) -> tuple[int, int, int]:
    nan = infinite = count = 0
    for part in _parts(extent, np.dtype(form.item).itemsize * form.stride):
        bits = np.frombuffer(part, dtype=form.item)[:: form.stride]
        special = bits[(bits & form.exponent) == form.exponent]
        nans = int(np.count_nonzero(special & form.fraction))
        nan, infinite = nan + nans, infinite + len(special) - nans
        count += len(bits)
    return nan, infinite, count


def _parts(extent: Extent, step: int = 1) -> Iterator[memoryview]:
    """Read a tensor's bytes in parts of whole steps; each is good until the next one is read."""
    buffer = bytearray(min(extent.bytes, CHUNK_BYTES // step * step))
    with extent.path.open("rb", buffering=0) as file:
        file.seek(extent.offset)
        left = extent.bytes
        while left:
            part = memoryview(buffer)[: min(left, len(buffer))]
            _fill(file, part)
            yield part
            left -= len(part)


def _fill(file: object, target: memoryview) -> None:
    done = 0
    while done < len(target):
        count = file.readinto(target[done:])  # type: ignore[attr-defined]
        if not count:
            raise OSError("the file became shorter while it was read")
        done += count


def _finding(extent: Extent, nan: int, infinite: int, count: int) -> Finding:
    kind = "values" if FORMS[extent.form].elements == 1 else "scales"
    what = f"{nan} NaN and {infinite} infinite of {count} {kind}"
    remedy = "training diverged or the file is damaged: take an earlier checkpoint"
    if infinite and not nan and extent.form == "F16":
        remedy = "values beyond fp16's 65504 were converted: export with bf16 or fp32"
    return Place(file=extent.path.name).error(extent.name, what, remedy)
