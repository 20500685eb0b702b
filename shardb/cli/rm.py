"""The verb `rm`: removing a snapshot or a branch."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import shardb
from shardb import refs
from shardb.branching import (
    Loss,
    check_not_last,
    delete_branch,
    delete_snapshot,
    deletion_record,
    would_lose,
)
from shardb.cli.places import JsonOption, NetworkOption, StoreArgument, split_store
from shardb.cli.printing import in_bytes, print_json, steps_text
from shardb.errors import NotFoundError, UsageError
from shardb.records import Commit


def rm(
    store: StoreArgument = None,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A snapshot or a branch.", show_default=False),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove a branch although steps go with it.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")
    ] = False,
    json: JsonOption = False,
    allow_network: NetworkOption = False,
) -> None:
    """Remove a snapshot or a branch, and say which steps nothing keeps any more.

    Those steps cannot be had back. A snapshot goes at once. A branch on which there are steps that
    neither a snapshot nor another branch keeps is refused (exit code 2) without --yes; the last
    branch is always refused. Their log stays: `shardb log` tells them for ever.

    \b
    Examples:
      shardb rm run best
      shardb rm run colder --dry-run
      shardb rm run colder --yes

    A branch that somebody writes to is refused (exit code 5). What a live reader holds goes when it
    is done. An interrupt leaves the name there or removed.
    """
    root, name = split_store(store, name)
    if name is None:
        raise UsageError("the name is missing; expected [STORE] NAME")
    with shardb.open(root, allow_network=allow_network) as opened:
        kind, commit = _named(opened, name)
        if kind == "branch":
            check_not_last(name, opened.branches())
        loss = would_lose(opened, deletion_record(kind, name))
        if kind == "branch" and loss.commits and not (yes or dry_run):
            raise UsageError(
                f"branch {name!r} alone keeps {steps_text(loss.steps)}: they would be lost. "
                "Keep them under a snapshot, or pass --yes"
            )
        if not dry_run:
            (delete_snapshot if kind == "snapshot" else delete_branch)(opened, name)
    if json:
        print_json(_to_json(kind, name, commit, loss, dry_run=dry_run))
    else:
        _print_text(kind, name, commit, loss, dry_run=dry_run)


def _named(store: shardb.Store, name: str) -> tuple[str, Commit]:
    """Whether a name is a snapshot's or a branch's, and its commit."""
    snapshots, branches = store.snapshots(), store.branches()
    if name in snapshots:
        return "snapshot", snapshots[name]
    if name in branches:
        return "branch", branches[name]
    raise NotFoundError(refs.no_such("snapshot or branch", name, [*snapshots, *branches]))


def _to_json(kind: str, name: str, commit: Commit, loss: Loss, *, dry_run: bool) -> dict[str, Any]:
    return {
        "kind": kind,
        "name": name,
        "step": commit.step,
        "commit": commit.id,
        "dry_run": dry_run,
        "lost": [
            {"step": c.step, "commit": c.id, "leased": c.id in loss.leased} for c in loss.commits
        ],
        "freed_bytes": loss.freed_bytes,
    }


def _print_text(kind: str, name: str, commit: Commit, loss: Loss, *, dry_run: bool) -> None:
    removed, goes = ("would remove", "would go") if dry_run else ("removed", "gone")
    print(f"{removed} {kind} {name}, at step {commit.step} (commit {commit.id})")
    if not loss.commits:
        print("no step is lost: others keep them all")
        return
    print(f"{goes}: {steps_text(loss.steps)}; {in_bytes(loss.freed_bytes)} for reuse")
    if loss.leased:
        print("a reader holds some of it; that goes when it is done")
