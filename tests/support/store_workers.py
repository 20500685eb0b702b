"""Processes that work on a store until they are told to stop or are killed.

Each worker is a function that prints one line whenever something is true from then on; `started`
runs one in a process of its own, and ends it whatever the test does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import shardb
from tests.support.stores import commit_step, values_of

REPOSITORY = Path(__file__).resolve().parent.parent.parent


class Worker:
    """A worker process as its test sees it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def line(self) -> str:
        """Give its next line; fails when it ended before."""
        assert self.process.stdout is not None
        text = self.process.stdout.readline().strip()
        assert text, f"the worker ended with {self.process.wait()}"
        return text

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def finish(self) -> list[str]:
        """Let it end; give what it printed since."""
        rest, _ = self.process.communicate()
        assert self.process.returncode == 0, f"the worker ended with {self.process.returncode}"
        return rest.splitlines()


@contextmanager
def started(worker: Callable[..., None], *arguments: object) -> Iterator[Worker]:
    """Run a worker of this module in a process of its own."""
    command = [sys.executable, "-m", "tests.support.store_workers", worker.__name__]
    process = subprocess.Popen(
        [*command, *map(str, arguments)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Worker(process)
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def say(text: object) -> None:
    print(text, flush=True)


def wait_for_end(stream: IO[str] = sys.stdin) -> None:
    stream.read()


def commit_steps(root: str, branch: str = "main", count: str = "1000000") -> None:
    """Commit step after step; say each one's number when it is durable."""
    with shardb.open(root, create=True) as store:
        head = store.branches().get(branch)
        first = head.step + 1 if head else 1
        for step in range(first, first + int(count)):
            commit_step(store, step, branch=branch)
            say(step)


def hold_writer(root: str, branch: str = "main") -> None:
    """Be the writer of a branch until the end."""
    with shardb.open(root, create=True) as store, store.begin(branch):
        say("writing")
        wait_for_end()


def hold_lease(root: str, ref: str) -> None:
    """Read a commit again and again, from its files, and say what it holds when it changes."""
    with shardb.open(root, cache_bytes=0, verify=False) as store, store.at(ref=ref) as view:
        expected = values_of(view)
        say(sorted(expected.values()))
        while True:
            assert values_of(view) == expected
            time.sleep(0.001)


def read_heads(root: str, branch: str = "main") -> None:
    """Read the newest commit again and again: it is whole, and never older than the one before."""
    step = 0
    with shardb.open(root, cache_bytes=0) as store:
        while True:
            with store.at(branch=branch) as view:
                assert view.commit.step >= step, f"{view.commit.step} after {step}"
                step = view.commit.step
                assert min(values_of(view).values()) == step
            say(step)


def leave_orphan(root: str) -> None:
    """Begin a transaction and hold a lease, fork a child that goes on living, say its number."""
    store = shardb.open(root)
    store.begin("main")
    store.at()
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    say(child)
    wait_for_end()


WORKERS = (commit_steps, hold_writer, hold_lease, read_heads, leave_orphan)

if __name__ == "__main__":
    {worker.__name__: worker for worker in WORKERS}[sys.argv[1]](*sys.argv[2:])
