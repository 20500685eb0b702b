"""The verb `recover`."""

from __future__ import annotations

from typing import Any

import shardb
from shardb.cli.info import owner_text
from shardb.cli.places import JsonOption, NetworkOption, StoreArgument, store_path
from shardb.cli.printing import print_json
from shardb.errors import NotFoundError, ShardbError
from shardb.filesystem import RealFileSystem
from shardb.recovery import told
from shardb.reserve import with_reserve


def recover(
    store: StoreArgument = None, json: JsonOption = False, allow_network: NetworkOption = False
) -> None:
    """Open a store, bring it to its last commit after a crash, and say what was found.

    Every other command does the same when it opens the store; this one reports it. A torn record at
    the end of the log, which was never reported as done, is cut; a missing or old index is brought
    up from the log. Nothing else is ever removed. Beside a live writer it changes nothing.

    \b
    Examples:
      shardb recover run
      shardb recover run --json

    Keys of --json: opened (branch to commit and step), dropped, rebuilt and warnings (lists with
    what, path, why), needs (the next command to type, or null). Where the store cannot be opened,
    the same keys are printed, and error.

    It works with zero bytes free. An interrupt leaves the store as it was, or recovered.
    """
    root = store_path(store)
    try:
        with with_reserve(
            RealFileSystem(), root, lambda: shardb.open(root, allow_network=allow_network)
        ) as opened:
            report = opened.recovery.to_json()
            writers = opened.locks.writers()
    except NotFoundError:
        raise
    except ShardbError as error:
        if json:
            print_json(_refused(root, error))
        raise
    for writer in writers:
        why = f"{owner_text(writer)} writes to branch {writer['branch']!r}; nothing was changed"
        report["warnings"].append({"what": "live writer", "path": root, "why": why})
    if any(warning["what"] == "closed log segment" for warning in report["warnings"]):
        report["needs"] = report["needs"] or f"shardb fsck {root}"
    if json:
        print_json(report)
    else:
        _print_text(root, report)


def _refused(root: str, error: ShardbError) -> dict[str, Any]:
    return {
        "opened": {},
        "dropped": [],
        "rebuilt": [],
        "warnings": [],
        "needs": f"shardb fsck {root}" if error.exit_code == 3 else f"shardb gc {root}",
        "error": error.to_json(),
    }


def _print_text(root: str, report: dict[str, Any]) -> None:
    for branch, found in report["opened"].items():
        print(f"opened   branch {branch} at step {found['step']} (commit {found['commit']})")
    if not report["opened"]:
        print(f"opened   {root}: no commit yet")
    for title, word in (("dropped", "dropped"), ("rebuilt", "rebuilt"), ("warnings", "note")):
        for line in told(report[title]):
            print(f"{word:<7}  {line}")
    if report["needs"]:
        print(f"next     {report['needs']}")
