"""Which store a command means.

Owns the rule for the optional STORE argument: the first argument if there is a store at that path,
else `$SHARDB_STORE`, else the current directory if it is a store. Knows nothing of what the other
arguments mean. Invariant: whether a path is a store is asked of the file system, never of the
spelling of the argument.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated

import typer

from shardb.errors import NotFoundError, UsageError
from shardb.filesystem import RealFileSystem, leads_nowhere
from shardb.format import format_path, has_objects

VARIABLE = "SHARDB_STORE"

StoreArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="STORE",
        help=f"Directory of the store. Default: ${VARIABLE}, else the current directory.",
        show_default=False,
    ),
]
NetworkOption = Annotated[
    bool,
    typer.Option(
        "--allow-network",
        help="Open a store on a network file system; only where one machine alone ever does.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def looks_like_store(path: str) -> bool:
    """Whether there is a store at `path`, damaged or not: a FORMAT file, a log, or objects."""
    files = RealFileSystem()
    there = any(files.exists(place) for place in (format_path(path), f"{path}/wal"))
    return there or has_objects(files, path)


def store_path(given: str | None) -> str:
    """The absolute path of the store that is meant; NotFoundError when none is."""
    if given is not None:
        return _directory(given)
    variable = os.environ.get(VARIABLE)
    if variable:
        return _directory(variable)
    if looks_like_store(os.getcwd()):
        return os.getcwd()
    raise NotFoundError(
        f"no store is named: give its directory, set ${VARIABLE}, or change into a store"
    )


def _directory(given: str) -> str:
    """The absolute path; UsageError for a URL, where these verbs cannot work."""
    if "://" in given:
        raise UsageError(
            f"{given}: this verb works on a store in a directory, not at a URL; "
            f"`shardb clone {given} DIRECTORY` brings it here"
        )
    return os.path.abspath(given)


def split_store(first: str | None, second: str | None) -> tuple[str, str | None]:
    """Split the arguments of a verb that takes [STORE] and one more; the other one may be None.

    Two arguments always begin with the store; a single one is the store if there is one at it.
    """
    if first is None:
        return store_path(None), None
    if second is not None or looks_like_store(first):
        return _directory(first), second
    try:
        return store_path(None), first
    except NotFoundError as error:
        raise _no_store_at(first) from error


def split_words(words: Sequence[str] | None, expected: str, *, most: int) -> tuple[str, list[str]]:
    """Split [STORE] and up to `most` more words; the first is the store if there is one at it.

    With all of them given it is the store in any case. UsageError when there are more.
    """
    given = list(words or [])
    if len(given) > most + 1:
        raise UsageError(f"too many arguments: {' '.join(given)!r}; expected {expected}")
    if given and (len(given) == most + 1 or looks_like_store(given[0])):
        return _directory(given[0]), given[1:]
    try:
        return store_path(None), given
    except NotFoundError as error:
        if not given:
            raise
        raise _no_store_at(given[0]) from error


def _no_store_at(word: str) -> NotFoundError:
    if leads_nowhere(RealFileSystem(), word):
        there = "there is no store here: this is a link that leads nowhere; mount or bring back"
        return NotFoundError(f"{word}: {there} what it leads to")
    return NotFoundError(
        f"{word}: there is no store here, and no other one is named: give its directory first, set "
        f"${VARIABLE}, or change into a store"
    )
