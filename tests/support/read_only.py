"""File systems on which nothing can be written, simulated and real."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from shardb.filesystem import CREATE, WRITE, RealFileSystem

CHANGES = "pwrite truncate allocate make_directory remove_directory rename unlink".split()


class RefusingFiles(RealFileSystem):
    """Real files that refuse every change with `code`, and remember whether one was tried."""

    def __init__(self, code: int = errno.EROFS) -> None:
        self.code = code
        self.tried: list[str] = []
        for name in CHANGES:
            setattr(self, name, self._refusal(name))

    def _refusal(self, name: str) -> Any:
        def refuse(*_: Any, **__: Any) -> NoReturn:
            self.tried.append(name)
            raise OSError(self.code, os.strerror(self.code))

        return refuse

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        if flags & (WRITE | CREATE):
            self.tried.append(path)
            raise OSError(self.code, os.strerror(self.code), path)
        return super().open(path, flags, mode)


@contextmanager
def mounted_read_only(source: Path, target: Path) -> Iterator[Path]:
    """A second, read-only sight of a directory; skips where nobody may mount."""
    if os.getuid() != 0:
        pytest.skip("only root can mount a directory read-only")
    target.mkdir()
    bound = subprocess.run(["mount", "--bind", source, target], capture_output=True, check=False)
    if bound.returncode != 0:
        pytest.skip(f"a directory cannot be mounted here: {bound.stderr.decode().strip()}")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", target], check=True)
        yield target
    finally:
        subprocess.run(["umount", "--lazy", target], check=True)
