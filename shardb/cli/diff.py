"""The verb `diff`: what changed between two commits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from shardb.cli.places import JsonOption, NetworkOption, split_words
from shardb.cli.printing import print_json, print_table
from shardb.cli.progress import ProgressLine
from shardb.comparing import Change, ShardDifference, compare
from shardb.errors import UsageError
from shardb.read_only import open_to_look
from shardb.read_view import CommitView
from shardb.records import Commit

SAME, CHANGED, ADDED, REMOVED = "same", "changed", "added", "removed"


def diff(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[STORE] REF [REF]", help="Two commits; the second: default main."),
    ] = None,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="Tell every tensor that changed.")
    ] = False,
    json: JsonOption = False,
    allow_network: NetworkOption = False,
) -> None:
    """Compare two commits shard by shard: the same object or not, and how far the tensors moved.

    The relative change is ||b - a|| / ||a|| over the float tensors of a shard; values that are no
    numbers are left out and counted. Shards that are the same object are not read, and memory does
    not grow with their size.

    \b
    Examples:
      shardb diff run step-2000 step-3000
      shardb diff run best                   from a snapshot to the newest commit of main
      shardb diff run main colder --tensors
      shardb diff run step-2000 main --json

    Keys of --json: from, to (commit and step), totals (a change for each kind of shard) and shards:
    name to status (same, changed, added, removed) and, where it changed, relative_change,
    change_norm, largest_change, nonfinite, tensors, integers, added, removed and reshaped. It
    changes nothing that is committed; an interrupt leaves nothing behind.
    """
    root, rest = split_words(words, "[STORE] REF [REF]", most=2)
    if not rest:
        raise UsageError("the commits are missing; expected [STORE] REF [REF]")
    with (
        ProgressLine() as progress,
        open_to_look(root, allow_network=allow_network) as opened,
        opened.at(ref=rest[0]) as before,
        opened.at(ref=rest[1] if len(rest) == 2 else None) as after,
    ):
        compared = list(_compared(before, after, progress))
    if json:
        print_json(_to_json(before.commit, after.commit, compared))
    else:
        _print_text(before.commit, after.commit, compared, tensors=tensors)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One shard of the two commits; `difference` is there where both have it, and differ."""

    name: str
    status: str
    difference: ShardDifference | None = None


def _compared(before: CommitView, after: CommitView, progress: ProgressLine) -> Iterator[Compared]:
    one, other = before.commit.shards, after.commit.shards
    digests = {name: (one[name].digest, other[name].digest) for name in one.keys() & other.keys()}
    changed = {name for name, (a, b) in digests.items() if a != b}
    total_bytes = sum(one[name].bytes for name in changed)
    done_bytes = 0
    for name in sorted(one.keys() | other.keys()):
        if name in changed:
            progress.show_bytes(f"comparing {name}", done_bytes, total_bytes)
            difference = compare(before.read(name), after.read(name))
            yield Compared(name=name, status=CHANGED, difference=difference)
            done_bytes += one[name].bytes
        elif name in digests:
            yield Compared(name=name, status=SAME)
        else:
            yield Compared(name=name, status=REMOVED if name in one else ADDED)


def _totals(compared: list[Compared]) -> dict[str, Change]:
    """The changes of all shards of a kind, which is what their names begin with."""
    totals: dict[str, Change] = {}
    for shard in compared:
        if shard.difference is not None and shard.difference.floats:
            kind = shard.name.partition("/")[0]
            totals[kind] = totals.get(kind, Change()) + shard.difference.total
    return totals


# For scripts


def _to_json(before: Commit, after: Commit, compared: list[Compared]) -> dict[str, Any]:
    return {
        "from": {"commit": before.id, "step": before.step},
        "to": {"commit": after.id, "step": after.step},
        "totals": {kind: _change_json(change) for kind, change in _totals(compared).items()},
        "shards": {shard.name: _shard_json(shard) for shard in compared},
    }


def _shard_json(shard: Compared) -> dict[str, Any]:
    found = shard.difference
    if found is None:
        return {"status": shard.status}
    return {
        "status": shard.status,
        **_change_json(found.total),
        "tensors": {name: _change_json(change) for name, change in found.floats.items()},
        "integers": found.integers,
        "added": list(found.added),
        "removed": list(found.removed),
        "reshaped": list(found.reshaped),
    }


def _change_json(change: Change) -> dict[str, Any]:
    return {
        "relative_change": change.relative,
        "change_norm": change.norm,
        "largest_change": change.largest,
        "changed_items": change.changed,
        "items": change.items,
        "nonfinite": change.nonfinite,
    }


# For people


def _print_text(before: Commit, after: Commit, compared: list[Compared], *, tensors: bool) -> None:
    for word, commit in (("from", before), ("to", after)):
        print(f"{word:<4}  step {commit.step} of {commit.branch} (commit {commit.id})")
    rows: list[tuple[str, ...]] = []
    for shard in compared:
        rows.append(_shard_row(shard))
        if tensors and shard.difference is not None:
            rows.extend(_tensor_rows(shard.difference))
    print_table(("shard", "relative change", "largest", "notes"), rows)
    same = sum(shard.status == SAME for shard in compared)
    totals = [f"{kind} {_relative(change)}" for kind, change in _totals(compared).items()]
    print("; ".join([f"{same} of {len(compared)} shards are the same object", *totals]))


def _shard_row(shard: Compared) -> tuple[str, ...]:
    found = shard.difference
    if found is None:
        note = "same object" if shard.status == SAME else shard.status
        return (shard.name, "", "", note)
    total = found.total
    notes = [
        f"{word} {', '.join(names)}"
        for word, names in (
            ("added", found.added),
            ("removed", found.removed),
            ("reshaped", found.reshaped),
        )
        if names
    ]
    notes += [f"{n:,} items of {name} differ" for name, n in found.integers.items() if n]
    notes += [f"{total.nonfinite:,} not finite"] if total.nonfinite else []
    shown = (_relative(total), f"{total.largest:.3g}") if found.floats else ("", "")
    return (shard.name, *shown, "; ".join(notes))


def _tensor_rows(found: ShardDifference) -> Iterator[tuple[str, ...]]:
    for name, change in found.floats.items():
        note = f"{change.nonfinite:,} not finite" if change.nonfinite else ""
        yield (f"  {name}", _relative(change), f"{change.largest:.3g}", note)


def _relative(change: Change) -> str:
    return f"{change.relative:.3e}"
