"""The verbs `show` and `ls`: one commit, and its shards."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from shardb.cli.places import JsonOption, NetworkOption, StoreArgument, split_store
from shardb.cli.printing import (
    compact_json,
    in_bytes,
    in_local_time,
    number,
    print_json,
    print_table,
)
from shardb.looking import Looking
from shardb.read_only import open_to_look
from shardb.read_view import CommitView
from shardb.records import Commit

Ref = Annotated[
    str | None,
    typer.Argument(
        metavar="REF",
        help="A branch, a snapshot, step-N, a commit id or 4 or more characters of one. Default: "
        "the newest commit of main.",
        show_default=False,
    ),
]


def show(
    store: StoreArgument = None,
    ref: Ref = None,
    json: JsonOption = False,
    allow_network: NetworkOption = False,
) -> None:
    """Show one commit: step, metrics, state, shards and their digests.

    \b
    Examples:
      shardb show run                  the newest commit
      shardb show run step-3000
      shardb show best                 a snapshot, inside a store's directory
      shardb show run --json

    Keys of --json: commit, branch, step, parent, time, metrics, state, statistics, recipe,
    snapshots, and shards: name to digest, bytes, step (which wrote it) and trainable.

    It changes nothing that is committed; an interrupt leaves nothing behind.
    """
    root, ref = split_store(store, ref)
    with open_to_look(root, allow_network=allow_network) as opened:
        found = describe(opened, opened.resolve(ref))
    if json:
        print_json(found)
    else:
        _print_text(found)


def ls(
    store: StoreArgument = None,
    ref: Ref = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List the tensors too.")] = False,
    json: JsonOption = False,
    allow_network: NetworkOption = False,
) -> None:
    """List the shards of one commit, and with --tensors what is in them.

    \b
    Examples:
      shardb ls run
      shardb ls run step-3000 --tensors
      shardb ls run --json

    It changes nothing that is committed; an interrupt leaves nothing behind.
    """
    root, ref = split_store(store, ref)
    with (
        open_to_look(root, verify=False, allow_network=allow_network) as opened,
        opened.at(ref=ref) as view,
    ):
        listed = [
            {"name": name, **shard_json(view.commit, name)}
            | ({"tensors": tensors_of(view, name)} if tensors else {})
            for name in view.names()
        ]
    if json:
        print_json(listed)
        return
    for shard in listed:
        kept = "" if shard["trainable"] else "  (not trainable)"
        print(f"{shard['name']:<32}  {in_bytes(shard['bytes']):>8}  step {shard['step']}{kept}")
        for name, spec in shard.get("tensors", {}).items():
            print(f"    {name:<36}  {spec['dtype']:<5} {spec['shape']}")


def describe(store: Looking, commit: Commit) -> dict[str, Any]:
    """Everything that `show` prints."""
    pinned = [name for name, c in store.snapshots().items() if c.id == commit.id]
    return {
        "commit": commit.id,
        "branch": commit.branch,
        "step": commit.step,
        "parent": commit.parent,
        "time": commit.time,
        "metrics": commit.metrics,
        "state": commit.state,
        "statistics": commit.statistics,
        "recipe": commit.recipe,
        "snapshots": pinned,
        "shards": {name: shard_json(commit, name) for name in commit.shards},
    }


def shard_json(commit: Commit, name: str) -> dict[str, Any]:
    """One shard of a commit, as scripts read it."""
    entry = commit.shards[name]
    return {
        "digest": entry.digest,
        "bytes": entry.bytes,
        "step": entry.step,
        "trainable": entry.trainable,
    }


def tensors_of(view: CommitView, name: str) -> dict[str, dict[str, Any]]:
    """Data types and shapes of a shard's tensors, from the object's header."""
    return {
        tensor: {"dtype": spec.dtype, "shape": list(spec.shape)}
        for tensor, spec in view.read(name).specs.items()
    }


def _print_text(found: dict[str, Any]) -> None:
    print(f"commit     {found['commit']}")
    print(f"step       {found['step']} of branch {found['branch']}")
    print(f"time       {in_local_time(found['time'])}")
    print(f"parent     {found['parent'] or 'none: this is the first commit'}")
    if found["snapshots"]:
        print(f"snapshots  {', '.join(found['snapshots'])}")
    for title in ("metrics", "state"):
        for position, (name, value) in enumerate(found[title].items()):
            shown = number(value, ".6g") or compact_json(value)
            print(f"{'' if position else title:<9}  {name} = {shown}")
    shards = found["shards"]
    total_bytes = sum(shard["bytes"] for shard in shards.values())
    print(f"shards     {len(shards)}, {in_bytes(total_bytes)} together")
    print_table(
        ("  name", "bytes", "step", "digest"),
        [
            (f"  {name}", f"{shard['bytes']:,}", str(shard["step"]), shard["digest"])
            for name, shard in shards.items()
        ],
    )
