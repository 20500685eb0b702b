"""The verb `rewind`: moving a branch back."""

from __future__ import annotations

from shlex import quote
from typing import Annotated, Any

import typer

import shardb
from shardb.branching import rewind as rewind_branch
from shardb.cli.places import JsonOption, NetworkOption, StoreArgument, split_store
from shardb.cli.printing import print_json, steps_text
from shardb.errors import UsageError
from shardb.records import Commit


def rewind(
    store: StoreArgument = None,
    branch: Annotated[
        str | None,
        typer.Argument(metavar="BRANCH", help="The branch to move.", show_default=False),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="REF", help="The commit to move it to.", show_default=False),
    ] = None,
    json: JsonOption = False,
    allow_network: NetworkOption = False,
) -> None:
    """Move a branch back to an earlier commit, or to any other that is retained.

    What it leaves behind is kept until `shardb gc`, so that a rewind can be undone by rewinding
    again; this prints how. It is logged, and takes the same short time in a store of any size.
    The next `train` goes on from there.

    \b
    Examples:
      shardb rewind run main --to step-3000
      shardb rewind run main --to best             a snapshot
      shardb rewind run main --to 019ad2f8         a commit, also one that a rewind left behind

    Refused while somebody writes to the branch (exit code 5). An interrupt leaves the branch moved
    or not moved.
    """
    root, branch = split_store(store, branch)
    if branch is None:
        raise UsageError("the branch is missing; expected [STORE] BRANCH --to REF")
    if to is None:
        raise UsageError("--to REF is missing: the commit to move the branch to")
    with shardb.open(root, allow_network=allow_network) as opened:
        done = rewind_branch(opened, branch, to)
    undo = f"shardb rewind {quote(root)} {branch} --to {done.before.id}" if done.left else None
    if json:
        print_json(
            {
                "branch": branch,
                "from": _json(done.before),
                "to": _json(done.after),
                "left_behind": [_json(commit) for commit in done.left],
                "undo": undo,
            }
        )
    elif undo is None:
        print(f"branch {branch} is at step {done.after.step} (commit {done.after.id}) already")
    else:
        moved = f"step {done.before.step} -> step {done.after.step} (commit {done.after.id})"
        print(f"branch {branch}: {moved}")
        print(f"left behind until `shardb gc`: {steps_text([commit.step for commit in done.left])}")
        print(f"to undo it: {undo}")


def _json(commit: Commit) -> dict[str, Any]:
    return {"step": commit.step, "commit": commit.id}
