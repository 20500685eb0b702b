"""The verb `repair`."""

from __future__ import annotations

import os
from shlex import quote
from typing import Annotated

import typer

from shardb.cli.places import JsonOption, NetworkOption, StoreArgument, store_path
from shardb.cli.printing import print_json
from shardb.cli.progress import ProgressLine
from shardb.errors import NotFoundError, UsageError
from shardb.filesystem import RealFileSystem
from shardb.fsck_audit import Progress, Reading
from shardb.remote.pull import RemoteSource
from shardb.remote.urls import is_url, open_remote
from shardb.repair import repair as repair_store
from shardb.repair_objects import Wishes
from shardb.repair_plan import Outcome, Plan
from shardb.repair_sources import RepairSource, StoreFiles

RECIPE = "meta/recipe"  # what a run was asked for; the other shards of this kind an import has too
ANEW = "a run begun anew with the same flags has the same meta/ shards"


def repair(
    store: StoreArgument = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it. Without this, only say what would be done.")
    ] = False,
    from_place: Annotated[
        str | None,
        typer.Option("--from", metavar="OTHER", help="Restore from this store: a path or a URL."),
    ] = None,
    rewind: Annotated[
        str | None,
        typer.Option("--rewind", metavar="BRANCH", help="Take this damaged branch back to --to."),
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", metavar="REF", help="Where --rewind goes.")
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option("--drop", metavar="SNAPSHOT", help="Drop this damaged one; may be repeated."),
    ] = None,
    cut: Annotated[
        bool, typer.Option("--cut", help="End a damaged log at its first damaged record.")
    ] = False,
    json: JsonOption = False,
    allow_network: NetworkOption = False,
) -> int:
    """Mend a damaged store, after saying what will be done and what will be lost by it.

    Without --yes nothing is changed. What --from has is restored, and every digest checked:
    objects, and parts of the log if OTHER is a copy of this very store. What nobody has is given
    up: snapshots are dropped, and branches go back to the nearest commit that is whole; but nothing
    is done where OTHER has nothing of what is damaged (exit code 4). --rewind and --drop limit what
    is given up to what they name. A damaged log goes on from the newest state that the index, or
    what is whole behind the damage, still gives; --cut ends it at the first damaged record. Damaged
    bytes are kept in wal/ and objects/ as `damaged-…`. FORMAT and the index are made anew.

    \b
    Examples:
      shardb repair run                                  what is wrong, and what would be done
      shardb repair run --from /mnt/backup/run --yes
      shardb repair run --from s3://bucket/runs/a
      shardb repair run --yes
      shardb repair run --rewind main --to step-3000 --drop best --yes

    The exit code is 0 when nothing is wrong or all of it was mended, and 1 when there is something
    to do, when something was lost, or when something stays damaged. Keys of --json: actions (each
    with what, path, does, loses), unmended, done, loses, remaining. A damaged log can only be
    mended while nobody has the store open (else exit code 5).

    An interrupt leaves a store that can be repaired: run the same command again.
    """
    if (rewind is None) != (to is None):
        raise UsageError("--rewind BRANCH and --to REF belong together")
    root = store_path(store)
    wishes = Wishes(rewinds={rewind: to} if rewind and to else {}, drops=drop or (), cut=cut)
    with ProgressLine() as progress:
        outcome = repair_store(
            root,
            yes=yes,
            source=None if from_place is None else _source(root, from_place),
            wishes=wishes,
            reading=Reading(on_progress=lambda told: _show(progress, told)),
            on_planned=lambda plan: _announce(plan, from_place, wishes, yes=yes, json=json),
            allow_network=allow_network,
        )
    if json:
        print_json(outcome.to_json())
    else:
        _print_text(outcome, _again(root, from_place, wishes), has_copy=from_place is not None)
    return outcome.exit_code


def _source(root: str, place: str) -> RepairSource:
    if is_url(place):
        return RemoteSource(open_remote(place))
    files, other = RealFileSystem(), os.path.abspath(place)
    if other == root:
        raise UsageError(f"--from {place}: this is the store that is to be repaired")
    if not files.exists(f"{other}/objects"):
        raise NotFoundError(f"--from {place}: there is no store here, not even a damaged one")
    return StoreFiles(files, other)


def _show(progress: ProgressLine, told: Progress) -> None:
    progress.show_bytes("checking objects", told.bytes, told.bytes_total)


def _announce(plan: Plan, from_place: str | None, wishes: Wishes, *, yes: bool, json: bool) -> None:
    """Before anything is done, say what; give nothing up for a store that helps with nothing."""
    chosen = wishes.chosen or wishes.cut
    is_refused = yes and from_place is not None and not chosen and _only_gives_up(plan)
    if yes and not json:
        _print_plan(plan, "would be done" if is_refused else "to do")
    if is_refused:
        if not json:
            _print_sources(plan, has_copy=True)
        raise NotFoundError(
            f"--from {from_place}: has nothing of what is damaged here, so nothing was changed;"
            " leave --from out, or name it with --rewind and --drop, to give up what is lost"
        )


def _only_gives_up(plan: Plan) -> bool:
    return bool(plan.actions) and all(action.loses is not None for action in plan.actions)


def _again(root: str, from_place: str | None, wishes: Wishes) -> str:
    """The command that does what was announced."""
    words = ["shardb", "repair", root]
    words += ["--from", from_place] if from_place else []
    for branch, ref in wishes.rewinds.items():
        words += ["--rewind", branch, "--to", ref]
    for name in wishes.drops:
        words += ["--drop", name]
    words += ["--cut"] if wishes.cut else []
    return " ".join(quote(word) for word in [*words, "--yes"])


def _print_plan(plan: Plan, title: str) -> None:
    for action in plan.actions:
        print(f"{title}: {action.does}")
        print(f"    {action.path}")
    for action in plan.actions:
        if action.loses is not None:
            print(f"lost for good: {action.loses}")
    for item in plan.unmended:
        print(f"cannot be mended: {item.why}")
        print(f"    {item.path}")


def _print_sources(plan: Plan, *, has_copy: bool) -> None:
    """While nothing was changed: who may have what is lost here."""
    other = "another copy" if has_copy else "a copy"
    print(f"nothing was changed. With {other} of the store, --from COPY may lose less")
    lost = [*(action.loses or "" for action in plan.actions), *(item.why for item in plan.unmended)]
    if any(RECIPE in text for text in lost):
        print(f"{ANEW}: --from RUN. An import has no {RECIPE}: --from it would lose these steps")
    elif any("meta/" in text for text in lost):
        print(f"{ANEW}, and so has the same import: --from RUN")


def _print_text(outcome: Outcome, again: str, *, has_copy: bool) -> None:
    plan = outcome.plan
    if plan.is_empty:
        print("nothing to repair")
        return
    if not outcome.done:
        _print_plan(plan, "would be done")
        if plan.loses or plan.unmended:
            _print_sources(plan, has_copy=has_copy)
        if plan.actions:
            print(f"to do it: {again}")
        return
    if not plan.actions:
        _print_plan(plan, "done")
        _print_sources(plan, has_copy=has_copy)
        return
    for finding in outcome.remaining:
        print(f"still damaged: {finding.kind}: {finding.path}")
    result = "what was lost was said above" if plan.loses else "nothing was lost"
    print(f"repaired; {result}" if not outcome.remaining else f"not all is repaired; {result}")
