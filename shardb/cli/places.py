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
from shardb.filesystem import RealFileSystem
from shardb.format import format_path

VARIABLE = "SHARDB_STORE"

StoreArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[STORE]",
        help=f"Directory of the store. Default: ${VARIABLE}, else the current directory.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def looks_like_store(path: str) -> bool:
    """Whether there is a store at `path`, damaged or not: a FORMAT file, or a log."""
    files = RealFileSystem()
    return any(files.exists(place) for place in (format_path(path), f"{path}/wal"))


def store_path(given: str | None) -> str:
    """The absolute path of the store that is meant; NotFoundError when none is."""
    if given is not None:
        return os.path.abspath(given)
    variable = os.environ.get(VARIABLE)
    if variable:
        return os.path.abspath(variable)
    if looks_like_store(os.getcwd()):
        return os.getcwd()
    raise NotFoundError(
        f"no store is named: give its directory, set ${VARIABLE}, or change into a store"
    )


def split_store(
    words: Sequence[str], *, names: Sequence[str], needed: int
) -> tuple[str, list[str]]:
    """Split arguments into the store's path and the others.

    `names` are those that may follow the store, the first `needed` of them must. As many arguments
    as `names` and one more always begin with the store; fewer do when the first one is a store.
    """
    if len(words) > len(names) + 1:
        raise UsageError(f"too many arguments; expected [STORE] {' '.join(names)}")
    first_is_store = bool(words) and (len(words) == len(names) + 1 or looks_like_store(words[0]))
    others = list(words[1:]) if first_is_store else list(words)
    if len(others) < needed:
        raise UsageError(f"{names[len(others)]} is missing; expected [STORE] {' '.join(names)}")
    if first_is_store:
        return os.path.abspath(words[0]), others
    try:
        return store_path(None), others
    except NotFoundError as error:
        if not words:
            raise
        raise NotFoundError(
            f"{words[0]}: there is no store here, and no other one is named: give its directory "
            f"first, set ${VARIABLE}, or change into a store"
        ) from error
