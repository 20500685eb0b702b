"""Commands that are killed in the middle, and what they leave."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import shardb
from shardb.filesystem import RealFileSystem
from shardb.fsck import check_store
from tests.support.commands import PROGRAM, REPOSITORY

POLL_SECONDS = 0.002


def killed_when(
    words: Sequence[object], condition: Callable[[], bool], delay_seconds: float
) -> bool:
    """Run `shardb` and kill it a while after a condition holds; whether it was still running."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, words)],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    while process.poll() is None and not condition():
        time.sleep(POLL_SECONDS)
    time.sleep(delay_seconds)
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), errors
    return process.returncode != 0


def is_staging(root: Path) -> bool:
    """Whether a copy into a store has begun to write an object."""
    return (root / "spare").is_dir() and any((root / "spare").glob("staged.*"))


def check_clean(root: Path) -> None:
    """The store opens, and nothing in it is wrong; leftovers are none."""
    if not (root / "FORMAT").exists():
        return
    with shardb.open(root):
        pass
    report = check_store(RealFileSystem(), str(root))
    assert not report.has_errors, report.to_json()
