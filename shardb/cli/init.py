"""The verb `init`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

import shardb
from shardb.cli.places import JsonOption, NetworkOption
from shardb.cli.printing import print_json


def init(
    store: Annotated[str, typer.Argument(metavar="STORE", help="Directory to make a store in.")],
    json: JsonOption = False,
    allow_network: NetworkOption = False,
) -> None:
    """Make an empty store. A store that is there already is opened and left as it is.

    `train --store` makes its own; this is for programs that bring their own shards.

    \b
    Examples:
      shardb init run
      shardb init /dev/shm/run --json

    An interrupt leaves directories without a FORMAT file: no store, and `init` goes on with them.
    """
    root = os.path.abspath(store)
    with shardb.open(root, create=True, allow_network=allow_network) as opened:
        branches = opened.branches()
        result = {
            "path": root,
            "store_id": opened.format.store_id,
            "version": opened.format.version,
            "commits": len(opened.commits()),
        }
    if json:
        print_json(result)
    elif branches:
        steps = ", ".join(f"{name} at step {commit.step}" for name, commit in branches.items())
        print(f"{root}: a store is here already: {steps}")
    else:
        print(f"{root}: an empty store (format {result['version']}, id {result['store_id']})")
