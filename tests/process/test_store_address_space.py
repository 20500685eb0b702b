"""Does a store open in a process that may have little address space, as a login node gives?"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.small_stores import fill_store

VERB = "import sys; from shardb.cli import main; sys.argv[0] = 'shardb'; main()"
# Python with what the package imports takes most of this.
SMALL_BYTES = 1 << 30
# Smaller than any map, and then than the interpreter's own needs for it.
MAP_TOO_LARGE = (
    "import resource, shardb, sys;"
    "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize();"
    "resource.setrlimit(resource.RLIMIT_AS, (used + (96 << 20), resource.RLIM_INFINITY));"
    "shardb.open(sys.argv[1])"
)


@pytest.fixture
def run(root: Path) -> Path:
    fill_store(root, range(3))
    return root


@pytest.mark.parametrize("verb", ["show", "fsck", "recover", "repair", "gc"])
def test_does_a_verb_do_with_a_gibibyte_of_address_space(run: Path, verb: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", VERB, verb, str(run)],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (SMALL_BYTES, SMALL_BYTES)),
        env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_is_the_limit_named_where_not_even_the_smallest_map_fits(run: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MAP_TOO_LARGE, str(run)],
        capture_output=True,
        text=True,
        check=False,
        env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("shardb.errors.StorageFailedError")
    assert "`ulimit -v`" in last
