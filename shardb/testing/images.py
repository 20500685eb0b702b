"""Which crash images to try at one point of a workload.

Owns the choice of images; `disk` owns what they hold. Every choice is a set of pending operations
that reached the disk, with how much of each write did. Deterministic for a seed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from shardb.testing.disk import SECTOR_BYTES, WHOLE, Choice, DiskState, Fill, Kept
from shardb.testing.operations import ENTRY_KINDS, Kind, Operation

PAGE_BYTES = 4096
Parts = dict[int, list[Kept]]
Named = Iterator[tuple[str, Choice]]
FILLS: tuple[Fill, ...] = ("old", "zero", "garbage")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageLimits:
    """How many images a point gets.

    All subsets up to so many pending operations, else random ones; each single operation lost and
    alone, or a random choice of so many; so many torn writes. With `every_index` the images of
    everything and of nothing meet every state of the index; all others meet two. With
    `point_images` a random choice of so many is left of all of these.
    """

    exhaustive_operations: int = 8
    random_subsets: int = 24
    single_operations: int = 64
    every_index: bool = True
    torn_writes: int = 32
    point_images: int | None = None


def choices(state: DiskState, *, limits: ImageLimits, seed: int) -> Named:
    """Name and content of every choice to try at this point; some may give equal images."""
    found = _all_choices(state, limits, seed)
    if limits.point_images is None:
        yield from found
        return
    listed = list(found)
    count = min(limits.point_images, len(listed))
    yield from random.Random(f"images {seed}").sample(listed, count)


def fault_class(label: str) -> str:
    """The kind of a choice, for counting, by the name that `choices` gave it."""
    if label.startswith("torn"):
        alone = label.endswith("alone")
        fill = label.removesuffix(" alone").rpartition(" ")[2]
        return f"torn, rest {fill}" + (", others lost" if alone else "")
    if label.startswith("extended"):
        return "size extended without data"
    named = {"alone with entries": "alone with entries", "entries": "entries without content"}
    named |= {"content": "content without entries", "random": "random subset"}
    for begin, name in named.items():
        if label.startswith(begin):
            return name
    return label.split(" ")[0]


def _all_choices(state: DiskState, limits: ImageLimits, seed: int) -> Named:
    pending = list({o.number: o for o in state.pending}.values())
    everything = {o.number: WHOLE for o in pending}
    yield "all", everything
    yield "none", {}
    entries = {o.number: WHOLE for o in pending if o.kind in ENTRY_KINDS}
    contents = {n: WHOLE for n in everything if n not in entries}
    yield "entries without content", entries
    yield "content without entries", contents
    singles = pending
    if len(pending) > limits.single_operations:
        singles = random.Random(f"single {seed}").sample(pending, limits.single_operations)
    for operation in singles:
        yield f"lost {operation}", _without(everything, operation.number)
        yield f"alone {operation}", {operation.number: WHOLE}
        if operation.kind not in ENTRY_KINDS:
            yield f"alone with entries {operation}", {**entries, operation.number: WHOLE}
    yield from _extended(pending, singles, entries)
    parts = {
        o.number: list(tears(o, len(state.durable_content(o.inode))))
        for o in pending
        if o.kind is Kind.WRITE
    }
    yield from _torn(pending, parts, entries, limits, seed)
    yield from _subsets(pending, parts, limits, seed)


def _without(choice: Choice, number: int) -> Choice:
    return {n: kept for n, kept in choice.items() if n != number}


def _extended(pending: list[Operation], singles: list[Operation], entries: Choice) -> Named:
    """Files that grew, with nothing of what was written into them: all of them, and single ones."""
    writes = [o for o in pending if o.kind is Kind.WRITE]
    for fill in ("zero", "garbage"):
        grown = {o.number: Kept(stop=0, fill=fill) for o in writes}
        yield f"extended with {fill}", {**entries, **grown}
    for write in (o for o in singles if o.kind is Kind.WRITE):
        grown = {write.number: Kept(stop=0, fill="zero")}
        yield f"extended with zero {write}", {**entries, **grown}


def _torn(
    pending: list[Operation], parts: Parts, entries: Choice, limits: ImageLimits, seed: int
) -> Named:
    """Each pending write by itself torn, with all other operations there or with none of them."""
    everything = {o.number: WHOLE for o in pending}
    torn = [(o, kept) for o in pending for kept in parts.get(o.number, ())]
    if len(torn) > limits.torn_writes:
        torn = random.Random(f"torn {seed}").sample(torn, limits.torn_writes)
    for write, kept in torn:
        label = f"torn {write} [{kept.start}:{kept.stop}] {kept.fill}"
        yield label, {**everything, write.number: kept}
        yield f"{label} alone", {**entries, write.number: kept}


def tears(write: Operation, durable_bytes: int) -> Iterator[Kept]:
    """Where a write can tear: at 512 bytes, 4 KiB, its half and its last sector; head or tail lost.

    Cuts lie on sector boundaries. Beyond the durable end of the file its half and its last byte
    are tried too, because a file may end at any byte.
    """
    length = len(write.data)
    sector = -write.offset % SECTOR_BYTES or SECTOR_BYTES
    page = -write.offset % PAGE_BYTES or PAGE_BYTES
    half = (write.offset + length // 2) // SECTOR_BYTES * SECTOR_BYTES - write.offset
    last = (write.offset + length - 1) // SECTOR_BYTES * SECTOR_BYTES - write.offset
    for cut in sorted({sector, page, half, last}):
        if 0 < cut < length:
            yield from (Kept(stop=cut, fill=fill) for fill in FILLS)
            yield Kept(start=cut, fill="zero")
    for cut in (length // 2, length - 1):
        if cut > 0 and write.offset + cut >= durable_bytes:
            yield from (Kept(stop=cut, fill=fill) for fill in FILLS)


def _subsets(pending: list[Operation], parts: Parts, limits: ImageLimits, seed: int) -> Named:
    if len(pending) <= limits.exhaustive_operations:
        for count in range(2, len(pending) - 1):
            for subset in itertools.combinations(pending, count):
                yield f"subset {[o.number for o in subset]}", {o.number: WHOLE for o in subset}
        return
    source = random.Random(f"subsets {seed}")
    for index in range(limits.random_subsets):
        share = source.choice((0.2, 0.5, 0.8, 0.95))
        chosen = {
            o.number: _any_part(parts.get(o.number, []), source)
            for o in pending
            if source.random() < share
        }
        yield f"random {index} {sorted(chosen)}", chosen


def _any_part(parts: list[Kept], source: random.Random) -> Kept:
    """Mostly whole; sometimes torn at a random place."""
    return source.choice(parts) if parts and source.random() < 0.25 else WHOLE
