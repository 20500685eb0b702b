"""The verbs `push` and `pull`, and what the other verbs of a transfer share with them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated

import typer

import shardb
from shardb.cli.places import JsonOption, NetworkOption, store_path
from shardb.cli.printing import print_json
from shardb.cli.transfer_display import TransferDisplay
from shardb.errors import NotFoundError, UsageError
from shardb.read_only import open_to_look
from shardb.records import Commit
from shardb.refs import no_such
from shardb.remote.pull import pull_commit, pull_snapshot
from shardb.remote.push import push_commit, push_snapshot
from shardb.remote.repository import RemoteStore
from shardb.remote.urls import is_url, open_remote
from shardb.transfer import Source, branch_of, copy_commit, copy_snapshot
from shardb.transfer_tally import Tally

RefOption = Annotated[
    str | None,
    typer.Option("--ref", metavar="REF", help="The commit: branch, snapshot, step-N or id."),
]
BranchOption = Annotated[
    str | None,
    typer.Option("--branch", metavar="NAME", help="The branch it is copied to; default: its own."),
]
SnapshotsOption = Annotated[
    list[str] | None,
    typer.Option("--snapshot", metavar="NAME", help="Copy this snapshot; may be repeated."),
]
End = shardb.Store | RemoteStore
Origin = Source | RemoteStore


def push(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[STORE] TARGET", help="The store, and the path or URL to copy to."),
    ] = None,
    ref: RefOption = None,
    branch: BranchOption = None,
    snapshot: SnapshotsOption = None,
    json: JsonOption = False,
    allow_network: NetworkOption = False,
) -> None:
    """Copy a commit of STORE, by default the newest of main, to another path or to object storage.

    TARGET is a directory, which becomes a store if there is none, or a URL: s3://BUCKET/PREFIX or
    file:///DIRECTORY. Only objects that are not there are copied, and each is checked. The branch
    moves forward only: where somebody else has pushed other steps the exit code is 5, nothing is
    lost, and `--branch other` copies beside. With --snapshot alone, no branch moves.

    \b
    Examples:
      shardb push run /mnt/backup/run
      shardb push run s3://bucket/runs/a
      shardb push run s3://bucket/runs/a --ref step-3000 --branch candidate
      shardb push run s3://bucket/runs/a --snapshot best --snapshot step-3000

    S3 is set up by AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL, or a
    profile in ~/.aws. It may run beside a live `train`. An interrupt leaves the target as it was,
    and objects that the next push finds: run the same command again.
    """
    root, target = two_places(words, "TARGET")
    with (
        TransferDisplay() as display,
        open_to_look(root, allow_network=allow_network) as source,
    ):
        check_names(source, ref, snapshot)
        with open_end(target, allow_network=allow_network) as end:
            copied = _copy(
                source, end, ref=ref, branch=branch, snapshots=snapshot, tally=display.tally
            )
    print_result("pushed to", copied, target, display, json=json)


def pull(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[STORE] SOURCE", help="The store, and what to copy from."),
    ] = None,
    ref: RefOption = None,
    branch: BranchOption = None,
    snapshot: SnapshotsOption = None,
    json: JsonOption = False,
    allow_network: NetworkOption = False,
) -> None:
    """Copy a commit of SOURCE, by default the newest of main, into STORE.

    SOURCE is a store on another path, or a URL that was pushed to. STORE is made if it is named and
    there is none: on a fresh machine, `shardb pull run s3://bucket/runs/a` and then `train --store
    run` goes on with the run, bit for bit. Every object's digest is checked before anything is
    committed. The branch moves forward only; with --snapshot alone, no branch moves.

    \b
    Examples:
      shardb pull run s3://bucket/runs/a
      shardb pull run /mnt/backup/run --ref step-3000 --branch retry
      shardb pull run s3://bucket/runs/a --snapshot best

    A branch that `train` is writing to cannot be pulled to (exit code 5). An interrupt leaves STORE
    as it was, and objects that the next pull finds: run the same command again.
    """
    root, source = two_places(words, "SOURCE")
    named = len(words or []) > 1
    with TransferDisplay() as display, open_origin(source, allow_network=allow_network) as end:
        check_names(end, ref, snapshot)
        with shardb.open(root, create=named, allow_network=allow_network) as target:
            copied = _copy(
                end, target, ref=ref, branch=branch, snapshots=snapshot, tally=display.tally
            )
    print_result("pulled into", copied, root, display, json=json)


# Parts


@dataclass(frozen=True, kw_only=True)
class Copied:
    """What a push or pull copied: a commit to a branch, if any, and snapshots."""

    commit: Commit | None = None
    branch: str | None = None
    snapshots: dict[str, Commit] = field(default_factory=dict)


def two_places(words: Sequence[str] | None, name: str) -> tuple[str, str]:
    """The store and the other end; one word is the other end."""
    words = words or []
    if not words:
        raise UsageError(f"{name} is missing; expected [STORE] {name}")
    if len(words) > 2:
        raise UsageError(f"too many arguments: {' '.join(words)!r}; expected [STORE] {name}")
    if len(words) == 2 and is_url(words[0]):
        raise UsageError(f"{words[0]}: the store must be on a path; the URL comes second")
    root = os.path.abspath(words[0]) if len(words) == 2 else store_path(None)
    return root, words[-1]


@contextmanager
def open_end(text: str, *, allow_network: bool) -> Iterator[End]:
    """Open what is copied to; it is made where there is nothing."""
    if is_url(text):
        yield open_remote(text, create=True)
        return
    with shardb.open(os.path.abspath(text), create=True, allow_network=allow_network) as store:
        yield store


@contextmanager
def open_origin(text: str, *, allow_network: bool) -> Iterator[Origin]:
    """Open what is copied from; a store that cannot be written is only looked at."""
    if is_url(text):
        yield open_remote(text, create=False)
        return
    with open_to_look(os.path.abspath(text), allow_network=allow_network) as store:
        yield store


def check_names(end: Origin, ref: str | None, snapshots: Sequence[str] | None) -> None:
    """Refuse unknown names before anything is made or copied."""
    if ref is not None or not snapshots:
        end.resolve(ref)
    for name in snapshots or ():
        if name not in (known := end.snapshots()):
            raise NotFoundError(no_such("snapshot", name, known))


def _copy(
    source: Origin,
    target: End,
    *,
    ref: str | None,
    branch: str | None,
    snapshots: Sequence[str] | None,
    tally: Tally,
) -> Copied:
    """Copy snapshots and a commit, or the snapshots alone where nothing else is asked for."""
    copied = {name: _copy_snapshot(source, target, name, tally) for name in snapshots or ()}
    if snapshots and ref is None and branch is None:
        return Copied(snapshots=copied)
    commit = _copy_commit(source, target, ref, branch, tally)
    to_branch = branch or branch_of(ref, commit, source.branches())
    return Copied(commit=commit, branch=to_branch, snapshots=copied)


def _copy_commit(
    source: Origin, target: End, ref: str | None, branch: str | None, tally: Tally
) -> Commit:
    if isinstance(source, RemoteStore):
        assert isinstance(target, shardb.Store)
        return pull_commit(source, target, ref, branch, tally=tally)
    if isinstance(target, RemoteStore):
        return push_commit(source, target, ref, branch, tally=tally)
    return copy_commit(source, target, ref, branch, tally=tally)


def _copy_snapshot(source: Origin, target: End, name: str, tally: Tally) -> Commit:
    if isinstance(source, RemoteStore):
        assert isinstance(target, shardb.Store)
        return pull_snapshot(source, target, name, tally=tally)
    if isinstance(target, RemoteStore):
        return push_snapshot(source, target, name, tally=tally)
    return copy_snapshot(source, target, name, tally=tally)


def print_result(
    done: str, copied: Copied, where: str, display: TransferDisplay, *, json: bool
) -> None:
    """Say what was done, in a word, and to which place."""
    snapshots = {
        name: {"commit": commit.id, "step": commit.step}
        for name, commit in copied.snapshots.items()
    }
    commit, branch = copied.commit, copied.branch
    if json:
        head = {
            "commit": commit and commit.id,
            "step": commit and commit.step,
            "branch": branch,
            "target": where,
            "snapshots": snapshots,
        }
        print_json({**head, **display.to_json()})
        return
    named = [f"snapshot {name} (step {row['step']})" for name, row in snapshots.items()]
    if commit is not None:
        named.append(f"branch {branch} at step {commit.step} (commit {commit.id})")
    print(f"{done} {where}: {', '.join(named)}: {display.summary()}", flush=True)
