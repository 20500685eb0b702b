"""The verbs `pack`, `unpack` and `du`: snapshots stored smaller, and where the space goes."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

import shardb
from shardb.cli.places import (
    JsonOption,
    NetworkOption,
    StoreArgument,
    looks_like_store,
    split_store,
    store_path,
)
from shardb.cli.printing import in_bytes, print_json, print_table
from shardb.cli.progress import ObjectsLine
from shardb.durations import duration
from shardb.errors import NotFoundError, UsageError
from shardb.pack import pack_snapshots
from shardb.pack_report import Packed
from shardb.pack_undo import unpack_snapshots
from shardb.pack_usage import StoreUsage, Usage, usage
from shardb.read_only import open_to_look

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[STORE] [REF]...",
        help="The store, and the snapshots that are meant: names, step-N or commit ids.",
        show_default=False,
    ),
]


def pack(
    words: Words = None,
    snapshots: Annotated[
        bool, typer.Option("--snapshots", help="All snapshots; so it is without any REF too.")
    ] = False,
    level: Annotated[
        int, typer.Option("--level", metavar="N", help="How hard zstd tries, from 1 to 19.")
    ] = 1,
    json: JsonOption = False,
    allow_network: NetworkOption = False,
) -> None:
    """Store snapshots smaller, without losing a bit.

    What snapshots alone need is packed: the bytes of each tensor are taken apart and compressed
    where that gains something, as a difference to the snapshot before where that is shorter. Every
    object is unpacked again and compared before its old file goes. It is read as before, only more
    slowly, by every command, and training can go on from it; digests stay the same. What a branch
    needs for its newest commits stays as it is, and so does what gains less than 5 %.

    \b
    Examples:
      shardb pack run                     all snapshots
      shardb pack run step-1000 step-2000
      shardb pack run --level 3 --json
      shardb du run                       what it saved

    Keys of --json: objects (each with shard, step, digest, bytes, packed_bytes, base, base_step),
    skipped (why to how many), bytes, packed_bytes, freed_bytes, seconds.

    It may run beside a live `train`, and needs space for one packed object at a time. An interrupt
    leaves packed what is packed; run the same command again for the rest.
    """
    root, refs = _store_and_refs(words)
    if snapshots and refs:
        raise UsageError(f"--snapshots means all of them, and {refs[0]} one; give one of the two")
    with shardb.open(root, allow_network=allow_network) as store, ObjectsLine("packed") as line:
        done = pack_snapshots(store, refs, level=level, on_progress=line.show_objects)
    if json:
        print_json(done.to_json())
    else:
        _print_packed(done)


def unpack(
    words: Words = None, json: JsonOption = False, allow_network: NetworkOption = False
) -> None:
    """Store packed snapshots whole again, as plain safetensors files.

    Reading them is then as fast as reading any other commit, and other programs can open the files.
    Without REF everything that is packed is unpacked.

    \b
    Examples:
      shardb unpack run step-1000
      shardb unpack run

    Keys of --json: objects, bytes, packed_bytes, seconds.

    It may run beside a live `train`. An interrupt leaves unpacked what is unpacked; run the same
    command again for the rest.
    """
    root, refs = _store_and_refs(words)
    with shardb.open(root, allow_network=allow_network) as store, ObjectsLine("unpacked") as line:
        done = unpack_snapshots(store, refs, on_progress=line.show_objects)
    if json:
        print_json(done.to_json())
    else:
        print(
            f"unpacked {_objects(done.objects)}: {in_bytes(done.packed_bytes)} to "
            f"{in_bytes(done.bytes)}, in {duration(done.seconds)}"
        )


def du(
    store: StoreArgument = None, json: JsonOption = False, allow_network: NetworkOption = False
) -> None:
    """Say where the space of a store goes: by branch, by snapshot, and what packing saves.

    holds: all bytes of the commits. takes: bytes of their files, what is shared counted once.
    alone: what would be free if this name alone were gone. saved: what packing saves of them.

    \b
    Examples:
      shardb du run
      shardb du run --json

    Keys of --json: names (each with kind, name, commits, steps, objects, packed_objects,
    logical_bytes, stored_bytes, unique_bytes, saved_bytes), objects, packed_objects, whole_bytes,
    stored_bytes, saved_bytes.

    It reads no object, and changes nothing; an interrupt leaves nothing behind.
    """
    with open_to_look(store_path(store), allow_network=allow_network) as opened:
        found = opened.index.read(usage)
    if json:
        print_json(found.to_json())
    else:
        _print_usage(found)


def _store_and_refs(words: list[str] | None) -> tuple[str, list[str]]:
    """The store that is meant and the refs: the first word is the store if there is one at it."""
    if not words:
        return store_path(None), []
    if len(words) == 1:
        root, ref = split_store(words[0], None)
        return root, [] if ref is None else [ref]
    if looks_like_store(words[0]):
        return store_path(words[0]), words[1:]
    try:
        return store_path(None), words
    except NotFoundError as error:
        raise NotFoundError(
            f"{words[0]}: there is no store here, and no other one is named: give its directory "
            "first, or change into a store"
        ) from error


def _print_packed(done: Packed) -> None:
    if done.objects:
        steps = {item.step for item in done.objects}
        rate = in_bytes(done.bytes / max(done.seconds, 1e-9))
        print(
            f"packed {_objects(len(done.objects))} of {len(steps)} "
            f"{'step' if len(steps) == 1 else 'steps'}: {in_bytes(done.bytes)} to "
            f"{in_bytes(done.packed_bytes)}, {in_bytes(done.bytes - done.packed_bytes)} freed, in "
            f"{duration(done.seconds)} ({rate}/s)"
        )
    else:
        print("nothing to pack")
    if done.skipped:
        print(f"left as they are: {_reasons(done.skipped)}")


def _reasons(skipped: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in skipped.most_common())


def _objects(count: int) -> str:
    return "1 object" if count == 1 else f"{count} objects"


def _print_usage(found: StoreUsage) -> None:
    headings = ("name", "kind", "steps", "holds", "takes", "alone", "saved")
    print_table(headings, [_row(item) for item in found.names], left=3)
    print(
        f"{_objects(found.objects)}, {found.packed_objects} of them packed, take "
        f"{in_bytes(found.stored_bytes)}; packing saves {in_bytes(found.saved_bytes)}"
    )


def _row(item: Usage) -> list[str]:
    first, last = item.steps
    sizes = (item.logical_bytes, item.stored_bytes, item.unique_bytes, item.saved_bytes)
    steps = str(last) if first == last else f"{first} to {last}"
    return [item.name, item.kind, steps, *map(in_bytes, sizes)]
