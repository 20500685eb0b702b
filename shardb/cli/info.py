"""The verb `info`."""

from __future__ import annotations

import os
from typing import Any

from shardb.branching import policy_of
from shardb.cli.places import JsonOption, NetworkOption, StoreArgument, store_path
from shardb.cli.printing import in_bytes, in_local_time, plain, print_json
from shardb.filesystem import FileSystem, list_if_there
from shardb.looking import Looking
from shardb.read_only import open_to_look

PARTS = ("objects", "spare", "wal", "index")


def info(
    store: StoreArgument = None, json: JsonOption = False, allow_network: NetworkOption = False
) -> None:
    """Say what a store holds: branches, writers, snapshots, readers, sizes.

    \b
    Examples:
      shardb info run
      shardb info run --json

    It changes nothing that is committed; an interrupt leaves nothing behind.
    """
    with open_to_look(store_path(store), allow_network=allow_network) as opened:
        found = describe(opened)
    if json:
        print_json(found)
    else:
        _print_text(found)


def describe(store: Looking) -> dict[str, Any]:
    """Everything that `info` prints."""
    commits = store.commits()
    objects = {e.digest: e.bytes for commit in commits for e in commit.shards.values()}
    writers = {writer["branch"]: writer for writer in store.locks.writers()}
    medium = store.files.kind(store.root)
    sizes = {part: _directory_bytes(store.files, f"{store.root}/{part}") for part in PARTS}
    return {
        "path": store.root,
        "store_id": store.format.store_id,
        "version": store.format.version,
        "medium": medium,
        "branches": {
            name: {
                "step": head.step,
                # As in the step log: nothing that is only in memory survives power loss.
                "durable_step": 0 if _is_volatile(medium) else store.durable_step(name),
                "commit": head.id,
                "writer": writers.get(name),
            }
            for name, head in store.branches().items()
        },
        "writers": list(writers.values()),
        "snapshots": {
            name: {"step": commit.step, "commit": commit.id}
            for name, commit in store.snapshots().items()
        },
        "retained_steps": sorted({commit.step for commit in commits}),
        "policy": policy_of(store).to_record(),
        "leases": plain(store.leases.describe_all()),
        "bytes": {"logical": sum(objects.values()), **sizes},
        "objects": len(objects),
        "free_bytes": store.files.space(store.root).free_bytes,
        "warnings": store.recovery.warnings,
    }


def _directory_bytes(files: FileSystem, directory: str) -> int:
    """Bytes allocated to the files of a directory; files that vanish meanwhile do not count."""
    total_bytes = 0
    for name in list_if_there(files, directory):
        try:
            total_bytes += files.status(f"{directory}/{name}").allocated_bytes
        except FileNotFoundError:
            continue
    return total_bytes


def _is_volatile(medium: str) -> bool:
    return medium.startswith("memory")


def _print_text(found: dict[str, Any]) -> None:
    sizes = found["bytes"]
    print(f"store      {os.path.relpath(found['path'])}  (id {found['store_id']}, "
          f"format {found['version']}, {found['medium']})")  # fmt: skip
    for name, branch in found["branches"].items():
        writer = branch["writer"]
        written_by = f"; written by {owner_text(writer)}" if writer else ""
        kept = "in memory only" if _is_volatile(found["medium"]) else "durable"
        print(f"branch     {name}: step {branch['step']}, {kept}{written_by}")
    if not found["branches"]:
        print("branch     none yet: the store has no commit")
    for name, pinned in found["snapshots"].items():
        print(f"snapshot   {name}: step {pinned['step']}")
    print(f"retained   steps {', '.join(map(str, found['retained_steps'])) or 'none'}")
    for lease in found["leases"]:
        print(f"reader     {owner_text(lease)}, of commit {lease['commit']}")
    print(
        f"sizes      {found['objects']} objects of {in_bytes(sizes['logical'])}; on disk: "
        + ", ".join(f"{part} {in_bytes(sizes[part])}" for part in PARTS)
        + f"; free {in_bytes(found['free_bytes'])}"
    )
    for warning in found["warnings"]:
        print(f"warning    {warning['what']}: {warning['why']}")


def owner_text(owner: dict[str, Any]) -> str:
    """Name the process that holds a lock or a lease."""
    since = owner.get("started") or owner.get("since")
    when = f" since {in_local_time(since)}" if isinstance(since, int | float) else ""
    if "pid" not in owner:
        return "a process that did not leave its name"
    return f"process {owner['pid']} on host {owner.get('host', '?')}{when}"
