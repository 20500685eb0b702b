"""Keeping freed memory: a process that frees and takes the same memory takes no new pages."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# 128 MiB are taken and freed again ten times, as by one step after another.
PROGRAM = """
import resource, sys
import torch
from trainer.host_memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def cycle():
    blocks = [torch.ones(12 << 20), torch.ones(20 << 20)]
for _ in range(5):
    cycle()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    cycle()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def new_pages(mode: str) -> int:
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True
    )
    return int(finished.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of the GNU C library")
def test_steps_take_no_new_pages() -> None:
    kept, given_back = new_pages("keep"), new_pages("as it is")
    assert given_back > 10 * 100, "memory was kept anyway: the test shows nothing"
    # A machine that is short of memory may take back what a process has not used for a moment.
    assert kept < given_back / 3
