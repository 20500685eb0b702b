"""The verb `gc`."""

from __future__ import annotations

from typing import Annotated

import typer

from shardb.cli.places import JsonOption, NetworkOption, StoreArgument, store_path
from shardb.cli.printing import in_bytes, print_json, warn
from shardb.errors import StorageFailedError
from shardb.gc import Collected, collect_garbage

# Lines about files that may not be removed.
SHOWN_MAX = 5


def gc(
    store: StoreArgument = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")
    ] = False,
    json: JsonOption = False,
    allow_network: NetworkOption = False,
) -> None:
    """Give disk space back: files that no commit, snapshot or reader needs.

    These are files kept for reuse, objects and staged files that a crash left, unreadable indexes
    that were set aside, leases of dead readers, and commits that a rewind left behind (after which
    the rewind cannot be undone). What is retained or pinned is never touched.

    \b
    Examples:
      shardb gc run
      shardb gc run --dry-run
      shardb gc run --json

    It needs no free space, and works on a full disk however often. It may run beside a live
    `train`, whose next steps then write new files. An interrupt leaves the rest for the next time.
    A file that you may not remove (another owner, `chattr +i`) is named, and the rest goes: exit
    code 7.
    """
    collected = collect_garbage(store_path(store), dry_run=dry_run, allow_network=allow_network)
    for note in collected.notes:
        warn(note)
    for line in collected.left[:SHOWN_MAX]:
        warn(line)
    if len(collected.left) > SHOWN_MAX:
        warn(f"and {len(collected.left) - SHOWN_MAX} more that may not be removed; --json has all")
    if json:
        print_json(collected.to_json())
    else:
        _print_text(collected)
    if collected.left:
        raise typer.Exit(StorageFailedError.exit_code)


def _print_text(collected: Collected) -> None:
    reasons: dict[str, list[int]] = {}
    for item in collected.removed:
        reasons.setdefault(item.why, []).append(item.bytes)
    for why, sizes in reasons.items():
        files = "1 file" if len(sizes) == 1 else f"{len(sizes)} files"
        print(f"{files}, {in_bytes(sum(sizes))}: {why}")
    if collected.abandoned:
        print(f"{len(collected.abandoned)} commits that a rewind left behind")
    verb = "would free" if collected.dry_run else "freed"
    print(f"{verb} {in_bytes(collected.freed_bytes)}")
