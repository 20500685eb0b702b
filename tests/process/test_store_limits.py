"""Does a store do where a process may have little, or say which limit is in the way?"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

import shardb
from tests.support.small_stores import fill_store, fsck, kinds

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


def test_is_the_limit_named_where_a_file_may_not_get_longer(run: Path) -> None:
    commits = (
        "import resource, sys, pathlib, shardb;"
        "from tests.support.small_stores import commit_step;"
        "store = shardb.open(sys.argv[1]);"
        "size = max(p.stat().st_size for p in pathlib.Path(sys.argv[1], 'wal').iterdir());"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY));"
        "store.create_snapshot('kept')"
    )
    done = subprocess.run(
        [sys.executable, "-c", commits, str(run)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 1
    assert "raise `ulimit -f`" in done.stderr.strip().splitlines()[-1]
    assert kinds(fsck(run)) in ([], ["log_torn_tail"])
    with shardb.open(run) as store:
        assert store.resolve("main").step == 2
        store.create_snapshot("kept")
