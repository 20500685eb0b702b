"""The verb `publish`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated

import typer

import shardb
from shardb.cli.places import JsonOption, NetworkOption
from shardb.cli.transfer import Copied, print_result, two_places
from shardb.cli.transfer_display import TransferDisplay
from shardb.errors import NotFoundError, UsageError
from shardb.records import Commit
from shardb.remote.urls import is_url
from shardb.state import DEFAULT_BRANCH
from shardb.transfer_publisher import Publisher

POLL_SECONDS = 1.0


def publish(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ACTIVE] DURABLE", help="The active store and the durable one."),
    ] = None,
    branch: Annotated[
        str, typer.Option("--branch", metavar="NAME", help="The branch to publish.")
    ] = DEFAULT_BRANCH,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with every new commit until interrupted.")
    ] = False,
    json: JsonOption = False,
    allow_network: NetworkOption = False,
) -> None:
    """Copy the newest commit of an active store, on a RAM disk for instance, into a durable one.

    `train --active` does this by itself; the verb is for a run that was killed, and with --follow
    for one that runs without it. The durable store's log gets the metrics of the steps between.

    \b
    Examples:
      shardb publish /dev/shm/run run
      shardb publish /dev/shm/run run --follow

    With --json and --follow one document is printed a commit. An interrupt leaves the durable store
    at the commit that was published last.
    """
    root, durable = two_places(words, "DURABLE")
    if is_url(durable):
        raise UsageError(f"{durable}: a durable store is on a path; `shardb push` copies to a URL")
    with shardb.open(root, allow_network=allow_network) as source:
        if not follow:
            source.resolve(branch)
        with (
            shardb.open(durable, create=True, allow_network=allow_network) as target,
            Publisher(source, target, branch) as publisher,
        ):
            for display, commit in _published(source, publisher, branch, follow=follow):
                copied = Copied(commit=commit, branch=branch)
                print_result("published to", copied, durable, display, json=json)


def _published(
    source: shardb.Store, publisher: Publisher, branch: str, *, follow: bool
) -> Iterator[tuple[TransferDisplay, Commit]]:
    """Publish the branch's head, and with `follow` each later one that is still there."""
    done: str | None = None
    while True:
        head = source.branches().get(branch)
        if head is not None and head.id != done:
            with TransferDisplay() as display:
                try:
                    publisher.publish(head, tally=display.tally)
                except NotFoundError:
                    continue  # retired since; there is a newer one
                publisher.wait()
                yield display, head
            done = head.id
        if not follow:
            return
        time.sleep(POLL_SECONDS)
