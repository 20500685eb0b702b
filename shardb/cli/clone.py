"""The verb `clone`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import shardb
from shardb.cli.places import JsonOption, NetworkOption
from shardb.cli.printing import print_json
from shardb.cli.transfer import check_names, open_end, open_origin
from shardb.cli.transfer_display import TransferDisplay
from shardb.errors import UsageError
from shardb.remote.clone import clone_from, clone_to
from shardb.remote.repository import RemoteStore
from shardb.remote.urls import is_url
from shardb.transfer import Cloned
from shardb.transfer import clone as clone_store


def clone(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A store's path, or a URL.")],
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="The new store's path, or a URL.")
    ],
    branch: Annotated[
        list[str] | None,
        typer.Option("--branch", metavar="NAME", help="Only this branch; may be repeated."),
    ] = None,
    snapshot: Annotated[
        list[str] | None,
        typer.Option("--snapshot", metavar="NAME", help="Only this snapshot; may be repeated."),
    ] = None,
    retained: Annotated[
        bool,
        typer.Option("--retained", help="Copy all commits that the branches keep, not only heads."),
    ] = False,
    json: JsonOption = False,
    allow_network: NetworkOption = False,
) -> None:
    """Copy a whole store: its branches, its snapshots and its retention policy.

    This is the way to copy a store, also beside a live `train`. `cp -r` is not: it reads the log,
    the index and the objects at different moments, and what it copies need not fit together. SOURCE
    may be a store that cannot be written, on a read-only mount for instance.

    \b
    Examples:
      shardb clone run /mnt/backup/run
      shardb clone run s3://bucket/runs/a
      shardb clone s3://bucket/runs/a run --branch main --snapshot best

    Every digest is checked on the way. An interrupt leaves an unfinished clone that is whole as far
    as it goes; the same command goes on with it.
    """
    if is_url(source) and is_url(target):
        raise UsageError("clone from a URL to a path first, then push from there")
    if retained and (is_url(source) or is_url(target)):
        raise UsageError("--retained is for clones between paths; name what to keep by --snapshot")
    with TransferDisplay() as display, open_origin(source, allow_network=allow_network) as origin:
        for name in snapshot or ():
            check_names(origin, None, [name])
        with open_end(target, allow_network=allow_network) as end:
            chosen: dict[str, Any] = {"branches": branch, "snapshots": snapshot}
            chosen["tally"] = display.tally
            if isinstance(origin, RemoteStore):
                assert isinstance(end, shardb.Store)
                cloned = clone_from(origin, end, **chosen)
            elif isinstance(end, RemoteStore):
                cloned = clone_to(origin, end, **chosen)
            else:
                cloned = clone_store(origin, end, retained=retained, **chosen)
    _print_clone(source, target, cloned, display, json=json)


def _print_clone(
    source: str, target: str, cloned: Cloned, display: TransferDisplay, *, json: bool
) -> None:
    if json:
        names = {
            what: {name: {"commit": c.id, "step": c.step} for name, c in found.items()}
            for what, found in (("branches", cloned.branches), ("snapshots", cloned.snapshots))
        }
        print_json({"source": source, "target": target, **names, **display.to_json()})
        return
    for name, commit in cloned.branches.items():
        print(f"branch {name} at step {commit.step} (commit {commit.id})")
    for name, commit in cloned.snapshots.items():
        print(f"snapshot {name} pins step {commit.step} (commit {commit.id})")
    print(f"cloned {source} to {target}: {display.summary()}")
