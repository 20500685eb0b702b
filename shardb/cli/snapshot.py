"""The verbs `snapshot` and `snapshots`: names that keep a commit."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import shardb
from shardb.branching import delete_snapshot
from shardb.cli.places import JsonOption, NetworkOption, StoreArgument, split_store, store_path
from shardb.cli.printing import in_local_time, print_json, print_table
from shardb.errors import CorruptionError, StorageFailedError, UsageError
from shardb.fsck_objects import check_object
from shardb.read_only import open_to_look


def snapshot(
    store: StoreArgument = None,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="The snapshot's name.", show_default=False),
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="Pin the commit of step N.")
    ] = None,
    ref: Annotated[
        str | None,
        typer.Option("--ref", metavar="REF", help="Pin the commit that REF names."),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Read every object; keep the snapshot only if all are good."),
    ] = False,
    json: JsonOption = False,
    allow_network: NetworkOption = False,
) -> None:
    """Keep a commit for good, under a name that never moves.

    A name of the form step-N pins the commit of step N; any other name pins the newest durable
    commit of main, or the one that --step or --ref says. It takes the same short time in a store of
    any size, and reads no object unless --verify is given.

    \b
    Examples:
      shardb snapshot run step-3000
      shardb snapshot run best --step 3000
      shardb snapshot run today            the newest commit; prints which step that is
      shardb snapshot step-3000            inside a store's directory

    The same name for the same commit is fine and changes nothing; for another commit it is refused.
    An interrupt leaves the snapshot made or not made, nothing between; with --verify it may be made
    and not verified.
    """
    root, name = split_store(store, name)
    if name is None:
        raise UsageError("the snapshot's name is missing; expected [STORE] NAME")
    if step is not None and ref is not None:
        raise UsageError("--step and --ref both say which commit; give one of them")
    wanted = f"step-{step}" if step is not None else ref
    with shardb.open(root, allow_network=allow_network) as opened:
        existed = name in opened.snapshots()
        commit = opened.create_snapshot(name, ref=wanted)
        if verify:
            _verify(opened, name, keep=existed)
    result = {"snapshot": name, "step": commit.step, "commit": commit.id, "created": not existed}
    if json:
        print_json(result)
    else:
        done = "was there already, and pins" if existed else "pins"
        print(f"snapshot {name} {done} step {commit.step} (commit {commit.id})")


def _verify(store: shardb.Store, name: str, *, keep: bool) -> None:
    """Read every object of a snapshot; unless `keep`, delete it when one is not as committed.

    It is pinned first: beside a fast run the commit would be gone before its last object is read.
    """
    try:
        with store.snapshot(name) as view:
            for shard, entry in view.commit.shards.items():
                check_object(store.files, store.root, shard, entry)
    except (CorruptionError, StorageFailedError):
        if not keep:
            delete_snapshot(store, name)
        raise


def snapshots(
    store: StoreArgument = None, json: JsonOption = False, allow_network: NetworkOption = False
) -> None:
    """List the snapshots of a store.

    \b
    Examples:
      shardb snapshots run
      shardb snapshots run --json

    It changes nothing that is committed; an interrupt leaves nothing behind.
    """
    with open_to_look(store_path(store), allow_network=allow_network) as opened:
        found: list[dict[str, Any]] = [
            {"snapshot": name, "step": commit.step, "commit": commit.id, "time": commit.time}
            for name, commit in opened.snapshots().items()
        ]
    found.sort(key=lambda row: (row["step"], row["snapshot"]))
    if json:
        print_json(found)
    elif not found:
        print("no snapshots; `shardb snapshot NAME` makes one")
    else:
        print_table(
            ("snapshot", "step", "committed", "commit"),
            [
                (row["snapshot"], str(row["step"]), in_local_time(row["time"]), row["commit"])
                for row in found
            ],
        )
