"""`make coverage`: every statement and every branch of what must not lose a step is tested.

Owns which modules those are, by the question they answer, and the quick tests that reach them: no
crash is simulated here. It says what is not reached, and where.

Exit codes: 0 all of it was reached; 1 something was not, or a test failed; 2 usage, or coverage.py
is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
# Patterns below `shardb/`.
MODULES: Mapping[str, Sequence[str]] = {
    "commit": ("transaction", "publishing", "appending", "objects", "references", "state"),
    "log": ("log", "frames", "records", "history"),
    "recovery": ("recovery", "opening", "format", "reserve"),
    "leases": ("leases", "locks"),
    "gc": ("gc",),
    "fsck": ("fsck", "fsck_*", "findings", "obstacles"),
    "repair": ("repair", "repair_*"),
}
TESTS = (
    *("appending", "beside_others", "contradictions", "digesting", "filesystem", "format"),
    *(
        "frames",
        "fsck",
        "fsck_log",
        "fsck_mended",
        "gc",
        "leases",
        "leasing",
        "locks",
        "log",
        "objects",
        "pack",
    ),
    *("pack_fsck", "pack_references", "publishing", "read_only", "records", "recovery", "refs"),
    *("directories_elsewhere", "unshown"),
    *("repair", "repair_ahead", "repair_log", "repair_objects", "repair_refused"),
    *("repair_salvage", "repair_wrong_index"),
    *(
        "repair_state",
        "seldom_errors",
        "state",
        "store",
        "store_closing",
        "store_writers",
        "timeline",
    ),
    *("transaction", "transaction_let_go", "transaction_refusals", "transfer_copy"),
    "transfer_objects",
)
MORE_TESTS = (
    *("tests/unit/shardb/cli", "tests/damage/test_in_the_way.py"),
    "tests/integration/test_linked_files.py",
)
# They damage at random for long, and reach no line that the others do not.
LEFT_OUT = (
    "test_fsck.py::test_does_no_damage_make_it_fail_or_find_nothing",
    "test_fsck_mended.py::test_does_no_flipped_bit_of_the_index_change_an_answer",
    "test_gc.py::test_does_an_interrupt_anywhere_leave_the_store_whole",
)


def modules() -> list[str]:
    """The paths of all modules, relative to the repository; each pattern has some."""
    found = []
    for patterns in MODULES.values():
        for pattern in patterns:
            paths = sorted((REPOSITORY / "shardb").glob(f"{pattern}.py"))
            assert paths, f"no module is called {pattern}"
            found += [path.relative_to(REPOSITORY).as_posix() for path in paths]
    return found


def tests() -> list[str]:
    """What pytest is given."""
    place = "tests/unit/shardb"
    named = [f"{place}/test_{name}.py" for name in TESTS]
    left_out = [word for name in LEFT_OUT for word in ("--deselect", f"{place}/{name}")]
    return [*named, *MORE_TESTS, *left_out]


def measure(words: Sequence[str], data: str) -> int:
    """Run tests under measurement; pytest's exit code."""
    command = [sys.executable, "-m", "coverage", "run", "--branch", f"--data-file={data}"]
    command += [f"--include={','.join(modules())}", "-m", "pytest", "-q", *words]
    return subprocess.run(command, cwd=REPOSITORY, check=False).returncode


def report(data: str) -> int:
    """Print what was reached; 0 if it was everything."""
    command = [sys.executable, "-m", "coverage", "report", f"--data-file={data}"]
    command += ["--show-missing", "--skip-covered", "--fail-under=100"]
    return subprocess.run(command, cwd=REPOSITORY, check=False).returncode


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and report."""
    text = __doc__ or ""
    parser = argparse.ArgumentParser(
        description=text.split("\n")[0], epilog=text.rpartition("\n\n")[2]
    )
    parser.add_argument("--list", action="store_true", help="say which modules, and end")
    arguments = parser.parse_args(words)
    if arguments.list:
        print("\n".join(modules()))
        return 0
    if importlib.util.find_spec("coverage") is None:
        print("coverage: coverage.py is not installed; pip install '.[test]'", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="shardb-coverage-") as scratch:
        data = os.path.join(scratch, "data")
        failed = measure(tests(), data) != 0
        missed = report(data) != 0
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(main())
