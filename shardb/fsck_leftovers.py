"""Checking what lies around: files that no commit needs, and what dead processes left.

Owns the names that a store's directories may hold, and which must be there. Knows which objects
are needed only from its caller. A leftover is no error: it takes space, and `shardb gc` removes it;
a missing directory is made when the store is opened.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Collection, Iterator
from shlex import quote

from shardb.filesystem import FileSystem
from shardb.findings import Finding, Severity, command
from shardb.format import DIRECTORIES
from shardb.fsck_view import View, any_branch_is_written, branch_is_written, is_held
from shardb.hard_links import shared_files
from shardb.log import SEGMENT_PATTERN
from shardb.objects import OBJECT_SUFFIX, PACK_SUFFIX, free_bytes_of

OBJECT_NAME = re.compile(rf"^([0-9a-f]{{32}}){re.escape(OBJECT_SUFFIX)}$")
PACK_NAME = re.compile(rf"^([0-9a-f]{{32}}){re.escape(PACK_SUFFIX)}$")
# Staged by a writer of the branch, or held for the buffers of a writer of any branch.
STAGED_NAME = re.compile(r"^(?:staged\.(?P<branch>.+)|held\.\d+)\.[0-9a-f]+$")
LEASE_NAME = re.compile(r"^[0-9a-f]{32}\.[0-9a-f]+$")
INDEX_NAMES = {"data.mdb", "lock.mdb"}
# What a repair keeps of the log and of objects, for whoever can read it.
SET_ASIDE = "damaged_set_aside"
SET_ASIDE_PREFIX = "damaged-"
# A reader locks its lease right after making it; a lease seen unlocked twice has no owner.
LEASE_PROBE_SECONDS = 0.05


def find_leftovers(
    files: FileSystem,
    view: View,
    needed: Collection[str] | None,
    packed: Collection[str] = (),
) -> Iterator[Finding]:
    """Every leftover of a view. `needed` are the digests that commits need, None when unknown.

    `packed` are those that are stored packed.
    """
    yield from _missing_directories(view)
    yield from _in_objects(view, needed, packed)
    yield from _in_spare(files, view)
    yield from _in_log(view)
    yield from _in_index(view)
    yield from _in_leases(files, view)
    yield from _shared(files, view)


def _missing_directories(view: View) -> Iterator[Finding]:
    """A missing log is told elsewhere, a missing index too."""
    for name in DIRECTORIES:
        if name not in view.names and name not in ("wal", "index"):
            yield Finding(
                kind="directory_missing",
                severity="warning",
                path=f"{view.root}/{name}",
                next_command=command("recover", view.root),
            )


def _shared(files: FileSystem, view: View) -> Iterator[Finding]:
    for name in shared_files(files, view.root):
        yield Finding(
            kind="shared_file",
            severity="warning",
            path=f"{view.root}/{name}",
            expected="a file of this store alone",
            found="another directory has it too: one is a hard-linked copy of the other",
            next_command=command("recover", view.root),
        )


def _in_objects(
    view: View, needed: Collection[str] | None, packed: Collection[str]
) -> Iterator[Finding]:
    names = view.names.get("objects", [])
    for name in names:
        image, pack = OBJECT_NAME.match(name), PACK_NAME.match(name)
        match = image or pack
        if match is None:
            yield _leftover(view, _partial_or_foreign(name), f"objects/{name}")
        elif needed is None:
            continue
        elif match.group(1) not in (needed if match is image else packed):
            yield _leftover(view, "object_unreferenced", f"objects/{name}")
        elif match is image and is_duplicate(match.group(1), names, packed):
            yield _leftover(view, "object_duplicate", f"objects/{name}")


def is_duplicate(digest: str, names: Collection[str], packed: Collection[str]) -> bool:
    """Whether an object that is packed has its image still; `names` are those in `objects/`."""
    return digest in packed and f"{digest}{PACK_SUFFIX}" in names


def spare_is_used(files: FileSystem, root: str, staged: re.Match[str]) -> bool:
    """Whether the writer of a staged or held file lives; `staged` is a match of `STAGED_NAME`."""
    branch = staged.group("branch")
    if branch is None:
        return any_branch_is_written(files, root)
    return branch_is_written(files, root, branch)


def _in_spare(files: FileSystem, view: View) -> Iterator[Finding]:
    for name in view.names.get("spare", []):
        told_bytes = free_bytes_of(name)
        staged = STAGED_NAME.match(name)
        if told_bytes is not None:
            yield from _misnamed(files, view, name, told_bytes)
        elif staged is None:
            yield _leftover(view, "foreign_file", f"spare/{name}")
        elif not spare_is_used(files, view.root, staged) and files.exists(
            f"{view.root}/spare/{name}"
        ):
            # Asked again, because the writer may have ended and tidied up since the view was taken.
            yield _leftover(view, "staged_leftover", f"spare/{name}")


def _misnamed(files: FileSystem, view: View, name: str, told_bytes: int) -> Iterator[Finding]:
    try:
        size_bytes = files.status(f"{view.root}/spare/{name}").size_bytes
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
        return  # somebody reuses it now, or it is a link, which is told elsewhere
    if size_bytes != told_bytes:
        yield _leftover(
            view,
            "spare_misnamed",
            f"spare/{name}",
            severity="warning",
            expected=f"{told_bytes} bytes",
            found=f"{size_bytes} bytes",
        )


def _in_log(view: View) -> Iterator[Finding]:
    for name in view.names.get("wal", []):
        if SEGMENT_PATTERN.match(name) is None:
            yield _leftover(view, _partial_or_foreign(name), f"wal/{name}")


def _in_index(view: View) -> Iterator[Finding]:
    for name in view.names.get("index", []):
        if name not in INDEX_NAMES:
            kind = "index_set_aside" if name.startswith("unreadable-") else "foreign_file"
            yield _leftover(view, kind, f"index/{name}")


def _in_leases(files: FileSystem, view: View) -> Iterator[Finding]:
    names = [name for name in view.names.get("leases", []) if LEASE_NAME.match(name)]
    loose = [name for name in names if not is_held(files, f"{view.root}/leases/{name}")]
    if loose:
        time.sleep(LEASE_PROBE_SECONDS)
    for name in loose:
        path = f"{view.root}/leases/{name}"
        if files.exists(path) and not is_held(files, path):
            yield _leftover(view, "lease_of_dead_reader", f"leases/{name}")


def _partial_or_foreign(name: str) -> str:
    if name.startswith(SET_ASIDE_PREFIX):
        return SET_ASIDE
    return "partial_file" if name.endswith(".partial") else "foreign_file"


def _leftover(
    view: View,
    kind: str,
    name: str,
    *,
    severity: Severity = "info",
    expected: str | None = None,
    found: str | None = None,
) -> Finding:
    return Finding(
        kind=kind,
        severity=severity,
        path=f"{view.root}/{name}",
        expected=expected,
        found=found,
        next_command=_next_command(view.root, kind, name),
    )


def _next_command(root: str, kind: str, name: str) -> str | None:
    if kind == "foreign_file":
        return None
    return f"rm -r {quote(f'{root}/{name}')}" if kind == SET_ASIDE else command("gc", root)
