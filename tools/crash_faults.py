"""`make faults`: fail the n-th call of every kind, in every verb, until none is left to fail.

Each verb runs on a store whose file system fails one call: every operation of the seam, with every
error of a list and short transfers, once and from then on. The error must be the store's own, and
the store that is left the one before the verb or, where the error says so, the one after it; then
a further commit must work. Syncs fail under three models of what memory shows afterwards.

Exit codes: 0 every fault survived; 1 violations; 2 usage; 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardb.testing.bases import Base
from shardb.testing.faulting import faulted_runs
from shardb.testing.operations import Fault
from shardb.testing.verbs import Verb, small_base
from tools.crash import RAM_DISK
from tools.crash_campaign import ALL_VERBS
from tools.crash_training import TRAIN, TRAIN_ACTIVE, goes_on, train_active_step, training_base

ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINTR, errno.ENOMEM, errno.EMFILE)
ERROR_NAMES = tuple(errno.errorcode[code] for code in ERRORS)
OPERATIONS = (
    *("open", "close", "pread", "pread_into", "pwrite", "truncate", "allocate", "map", "lock"),
    *("status", "exists", "list", "make_directory", "remove_directory", "rename", "unlink"),
    *("space", "kind", "database_committed"),
)
SYNCS = ("fsync", "fdatasync", "sync_directory")
TRANSFERS = ("pread", "pread_into", "pwrite")
SHORT_BYTES = (1, 100, 513)
FAULTED: Mapping[str, Verb] = {**ALL_VERBS, TRAIN_ACTIVE: train_active_step}
OnVerb = Callable[[str, Mapping[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class Loops:
    """What came of all loops: faulted runs by verb, operation and error, and what was wrong."""

    verbs: Counter[str]
    operations: Counter[str]
    errors: Counter[str]
    violations: list[str]

    @property
    def runs(self) -> int:
        """How many calls were failed."""
        return self.verbs.total()


def faults() -> Iterator[Fault]:
    """Every fault, each with `nth` 1: a loop counts up from there."""
    for persistent in (False, True):
        for operation in OPERATIONS:
            for code in ERRORS:
                yield Fault(operation=operation, nth=1, error=code, persistent=persistent)
        for operation in SYNCS:
            for code in ERRORS:
                fault = Fault(operation=operation, nth=1, error=code, persistent=persistent)
                yield fault
                if operation != "sync_directory":
                    yield replace(fault, pages="old")
                    yield replace(fault, pages="zero")
        for operation in TRANSFERS:
            for short in SHORT_BYTES:
                if short > 1 or not persistent:  # byte by byte, a run would take minutes
                    yield Fault(operation=operation, nth=1, short=short, persistent=persistent)


def loop(verb: str, base: Base, scratch: str, fault: Fault, loops: Loops) -> None:
    """Fail each call in turn and take down what came of it."""

    def make(nth: int) -> Fault:
        return replace(fault, nth=nth)

    name = "short transfer" if fault.short is not None else errno.errorcode[fault.error]
    more = goes_on if verb == TRAIN_ACTIVE else None
    for outcome, wrong in faulted_runs(base, scratch, make, FAULTED[verb], goes_on=more):
        loops.verbs[verb] += 1
        loops.operations[fault.operation] += 1
        loops.errors[name] += 1
        loops.violations.extend(
            f"{verb}, {outcome.fault}, then {outcome.error}: {reason}" for reason in wrong
        )


def main() -> int:
    """Run the loops of the verbs asked for, by default of all."""
    arguments = _arguments()
    loops = Loops(verbs=Counter(), operations=Counter(), errors=Counter(), violations=[])
    scratch = tempfile.mkdtemp(prefix="shardb-faults-", dir=arguments.scratch)
    try:
        codes = {getattr(errno, name) for name in arguments.error or ERROR_NAMES}
        for verb in arguments.verb or sorted(FAULTED):
            _run_verb(verb, scratch, loops, codes)
    except KeyboardInterrupt:
        print("faults: interrupted", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(scratch)
    if arguments.json:
        print(json.dumps({**vars(loops), "runs": loops.runs}, indent=2))
    else:
        for counted in (loops.operations, loops.errors):
            print(", ".join(f"{name} {count:,}" for name, count in sorted(counted.items())))
        print(f"{loops.runs:,} calls failed, {len(loops.violations)} violations")
    return 1 if loops.violations else 0


def _run_verb(verb: str, scratch: str, loops: Loops, codes: Collection[int]) -> None:
    began, before, known = time.monotonic(), loops.verbs[verb], len(loops.violations)
    root = os.path.join(scratch, f"base-{verb}")
    os.mkdir(root)
    base = (training_base if verb in (TRAIN, TRAIN_ACTIVE) else small_base)(root)
    for fault in faults():
        if fault.short is None and fault.error not in codes:
            continue
        loop(verb, base, scratch, fault, loops)
    print(
        f"{verb}: {loops.verbs[verb] - before:,} calls failed, "
        f"{len(loops.violations) - known} violations, {time.monotonic() - began:.0f} s",
        file=sys.stderr,
    )
    for violation in loops.violations[known:]:
        print(f"  {violation}\n  again: python -m tools.crash_faults --verb {verb}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog=(__doc__ or "").rpartition("\n\n")[2],
    )
    parser.add_argument(
        "--verb", action="append", choices=sorted(FAULTED), help="only this; may be repeated"
    )
    parser.add_argument(
        "--error", action="append", choices=ERROR_NAMES, help="only this; may be repeated"
    )
    place = RAM_DISK if os.access(RAM_DISK, os.W_OK) else None
    parser.add_argument("--scratch", default=place, help="directory for the simulated disks")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
