"""The verbs `branch` and `branches`: movable names for commits."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import shardb
from shardb.branching import create_branch
from shardb.cli.info import owner_text
from shardb.cli.places import JsonOption, NetworkOption, StoreArgument, split_store, store_path
from shardb.cli.printing import in_local_time, print_json, print_table, steps_text
from shardb.errors import UsageError
from shardb.read_only import open_to_look


def branch(
    store: StoreArgument = None,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="The branch's name.", show_default=False),
    ] = None,
    from_ref: Annotated[
        str | None,
        typer.Option("--from", metavar="REF", help="Where it begins; default: the newest of main."),
    ] = None,
    json: JsonOption = False,
    allow_network: NetworkOption = False,
) -> None:
    """Make a branch: a name that moves with the commits that are made on it.

    It takes the same short time in a store of any size, and copies nothing. Two processes may write
    to two branches of one store at the same time.

    \b
    Examples:
      shardb branch run colder --from step-3000
      shardb branch run retry                     from the newest commit of main
      train --store run --branch colder           goes on there

    The same name at the same commit is fine and changes nothing; elsewhere it is refused: a branch
    moves by commits, or by `shardb rewind`. An interrupt leaves it made or not made.
    """
    root, name = split_store(store, name)
    if name is None:
        raise UsageError("the branch's name is missing; expected [STORE] NAME")
    with shardb.open(root, allow_network=allow_network) as opened:
        existed = name in opened.branches()
        commit = create_branch(opened, name, from_ref)
    if json:
        told = {"branch": name, "step": commit.step, "commit": commit.id, "created": not existed}
        print_json(told)
    else:
        done = "was there already," if existed else "begins"
        print(f"branch {name} {done} at step {commit.step} (commit {commit.id})")


def branches(
    store: StoreArgument = None, json: JsonOption = False, allow_network: NetworkOption = False
) -> None:
    """List the branches of a store: where they are, what they keep, who writes to them.

    \b
    Examples:
      shardb branches run
      shardb branches run --json

    It changes nothing that is committed; an interrupt leaves nothing behind.
    """
    with open_to_look(store_path(store), allow_network=allow_network) as opened:
        writers = {writer["branch"]: writer for writer in opened.locks.writers()}
        rows = opened.index.read(lambda tables: dict(tables.items("branches")))
        steps = {commit.id: commit.step for commit in opened.commits()}
        found: list[dict[str, Any]] = [
            {
                "branch": name,
                "step": head.step,
                "commit": head.id,
                "time": head.time,
                "retained_steps": [steps[kept] for kept in rows[name]["retained"]],
                "writer": writers.get(name),
            }
            for name, head in opened.branches().items()
        ]
    if json:
        print_json(found)
    elif not found:
        print("no branch yet: the store has no commit")
    else:
        print_table(
            ("branch", "step", "committed", "commit", "keeps"),
            [
                (
                    row["branch"],
                    str(row["step"]),
                    in_local_time(row["time"]),
                    row["commit"],
                    _kept_text(row),
                )
                for row in found
            ],
        )


def _kept_text(row: dict[str, Any]) -> str:
    written_by = f"; written by {owner_text(row['writer'])}" if row["writer"] else ""
    return f"{steps_text(row['retained_steps'])}{written_by}"
