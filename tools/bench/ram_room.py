"""Room on a RAM disk for a benchmark that needs nearly all of a machine's memory.

Owns a tmpfs of its own where one can be mounted, files that wait in it for a store, and what the
machine's memory is while something runs. Knows nothing of training.

A virtual machine may get its memory only while it is used, and the first use of a page costs about
0.3 s a GiB and thread: so a store's spare files are made beforehand, by several threads.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from shardb.filesystem import CREATE, EXCLUSIVE, WRITE, RealFileSystem, opened, write_all

GIB = 1 << 30
# Pages of 2 MiB where the kernel has them for files in memory: fewer to touch and to lock.
MOUNT_OPTIONS = (",huge=always", "")
WATCH_SECONDS = 1.0
ZEROS = bytes(16 << 20)
# While less than this is available, a file waits so long for more.
RESERVE_BYTES, GROWING_SECONDS = 8 * GIB, 2.0


@contextmanager
def ram_disk(parent: Path, gib: int, say: Callable[[str], None]) -> Iterator[Path]:
    """Give a folder in memory, removed at the end: a mount of so many GiB, or one of `parent`."""
    folder = Path(tempfile.mkdtemp(prefix="size-", dir=parent))
    mounted = bool(gib) and _mount(folder, gib, say)
    try:
        yield folder
    finally:
        began = time.monotonic()
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=False)
        shutil.rmtree(folder, ignore_errors=True)
        say(f"{folder} is removed: {time.monotonic() - began:.1f} s")


def _mount(folder: Path, gib: int, say: Callable[[str], None]) -> bool:
    """Mount a RAM disk on a folder; else make the one around larger, and give False."""
    for more in MOUNT_OPTIONS:
        options = f"size={gib}G{more}"
        if _told(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], say):
            return True
    _told(["mount", "-o", f"remount,size={gib}G", str(folder.parent)], say)
    return False


def _told(words: Sequence[str], say: Callable[[str], None]) -> bool:
    try:
        done = subprocess.run(words, check=False, capture_output=True, text=True)
    except OSError as error:
        say(f"{' '.join(words)}: {error}")
        return False
    say(f"{' '.join(words)}: {done.stderr.strip() or 'done'}")
    return done.returncode == 0


class SpareFiles:
    """Makes files that wait for a store's next objects, each byte of them written.

    until: on the monotonic clock; the store makes what is missing then by itself.
    """

    def __init__(self, store: Path, until: float) -> None:
        self._folder = store / "spare"
        self._until = until
        self._files = RealFileSystem()
        self._lock = threading.Lock()
        self.made_bytes = 0
        self.problem: str | None = None

    def make(self, sizes: Sequence[int], threads: int) -> None:
        """Make one of each size; `problem` says why some did not come."""
        with ThreadPoolExecutor(threads) as executor:
            try:
                list(executor.map(self._make, sizes))
            except BaseException:
                self.problem = "it was interrupted"
                raise

    def _make(self, size: int) -> None:
        if self.problem is None and time.monotonic() > self._until:
            self.problem = "the time for it was over"
        if self.problem is not None:
            return
        self._wait_for_memory(size)
        path = self._folder / f"free.{size}.{os.urandom(8).hex()}"
        try:
            with opened(self._files, str(path), WRITE | CREATE | EXCLUSIVE) as file:
                self._files.allocate(file, size, keep_size=False)
                for start in range(0, size, len(ZEROS)):
                    piece = memoryview(ZEROS)[: size - start]
                    write_all(self._files, file, piece, start)
        except OSError as error:
            path.unlink(missing_ok=True)
            self.problem = str(error)
            return
        with self._lock:
            self.made_bytes += size

    def _wait_for_memory(self, size: int) -> None:
        """Let a machine whose memory grows with its use keep up."""
        until = time.monotonic() + GROWING_SECONDS
        while memory_of_machine()[1] < size + RESERVE_BYTES and time.monotonic() < until:
            time.sleep(0.05)


def memory_of_machine() -> tuple[int, int]:
    """Give total and available bytes, as the kernel tells them now."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    values = dict(line.split(":", 1) for line in lines)
    total, available = (int(values[k].split()[0]) * 1024 for k in ("MemTotal", "MemAvailable"))
    return total, available


def device_bytes() -> int | None:
    """Give what the first GPU has in use, by its driver; None where there is none."""
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(words, check=True, capture_output=True, text=True, timeout=10)
        return int(told.stdout.split()[0]) << 20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


class Watch:
    """Looks at memory all the time; `close` ends it."""

    def __init__(self) -> None:
        self.available_least_bytes = memory_of_machine()[1]
        self.device_most_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch")
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(WATCH_SECONDS):
            available = memory_of_machine()[1]
            self.available_least_bytes = min(self.available_least_bytes, available)
            self.device_most_bytes = max(self.device_most_bytes, device_bytes() or 0)
