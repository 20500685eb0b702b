"""Publishing: copying commits of an active store into a durable one, in the background.

Owns one copying thread with at most one commit in flight, and the lease of that commit. The caller
goes on training; an error of the copy is raised by the next call. While it is open the publisher is
the one writer of the durable store's branch.

`publish` blocks only while an earlier commit is still being copied: the queue cannot grow, and what
the disk cannot keep up with becomes visible as the seconds that `publish` returns.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType

from shardb.errors import ShardbError
from shardb.read_view import ReadView
from shardb.records import Commit
from shardb.state import DEFAULT_BRANCH
from shardb.store import Store
from shardb.transfer import copy_leased
from shardb.transfer_tally import Counts, Tally


class Publisher:
    """Copies commits of one branch from `source` into `target`; use it as a context manager."""

    def __init__(self, source: Store, target: Store, branch: str = DEFAULT_BRANCH) -> None:
        """Become the writer of the target's branch; BranchLockedError beside another one."""
        self._source = source
        self._target = target
        self._branch = branch
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shardb-publisher")
        self._running: Future[Commit] | None = None
        self._tally = Tally()
        self._held_before = target.locks.holds_branch(branch)
        with target.appender.errors(f"locking branch {branch!r}"):
            target.locks.take_branch(branch)

    @property
    def busy(self) -> bool:
        """Whether a commit is being copied."""
        return self._running is not None and not self._running.done()

    @property
    def durable_step(self) -> int | None:
        """The newest step of the branch in the durable store."""
        return self._target.durable_step(self._branch)

    @property
    def counts(self) -> Counts:
        """Objects and bytes of the copy that runs, or of the last one."""
        return self._tally.counts

    def publish(self, commit: Commit | None = None, *, tally: Tally | None = None) -> float:
        """Begin to copy a commit (by default the branch's head); return the seconds waited.

        Raises what the copy before ran into, and NotFoundError when the commit is retired already.
        """
        began = time.monotonic()
        self.wait()
        waited_seconds = time.monotonic() - began
        wanted = commit.id if commit is not None else self._source.resolve(self._branch).id
        view = self._source.at(commit=wanted)
        self._tally = tally or Tally()
        try:
            self._running = self._pool.submit(self._copy, view, self._tally)
        except BaseException:
            view.close()
            raise
        return waited_seconds

    def wait(self) -> int | None:
        """Wait for the copy in flight, raise what it ran into; return the durable step."""
        running, self._running = self._running, None
        if running is not None:
            running.result()
        return self.durable_step

    def close(self) -> None:
        """Wait for the copy in flight and give the branch up; raises what the copy ran into."""
        try:
            self.wait()
        finally:
            self._pool.shutdown(wait=True)
            if not self._held_before:
                self._target.locks.release_branch(self._branch)

    def _copy(self, view: ReadView, tally: Tally) -> Commit:
        with view:
            return copy_leased(self._source, view, self._target, self._branch, tally=tally)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        with suppress(ShardbError):  # the error of the block is the one to see
            self.close()
