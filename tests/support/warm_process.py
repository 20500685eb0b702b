"""A command in a process of its own that did not have to import it.

It is forked from a process which has imported the command and what it uses, and is from there on
what `python -m` makes: its own memory, outputs, signals and exit. A start takes a fifth of a second
instead of two. Where the start of Python itself or a process's peak of memory is looked at, take
`subprocess`.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TextIO

from tests.support.nursery import Command, asked

# By module: what its `main` imports once the flags are parsed, or lets PyTorch import.
IMPORTS = {
    "export.gguf_cli": ("export.gguf_export",),
    "export.hf_cli": ("export.hf_export",),
    "export.import_cli": ("export.import_run", "rich.progress"),
    "serve.cli": ("serve.start", "uvicorn"),
    "trainer.cli": ("trainer.start", "torch.fx.experimental.symbolic_shapes"),
}


class WarmProcess:
    """Like `subprocess.Popen` with both outputs as text pipes, as far as tests use it."""

    def __init__(self, module: str, arguments: Sequence[object]) -> None:
        command = Command(
            module=module,
            imports=IMPORTS[module],
            arguments=[*map(str, arguments)],
            environment={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        outputs, errors = os.pipe(), os.pipe()
        try:
            self.pid = int(asked("warm", ("start", command), [outputs[1], errors[1]]))
        finally:
            os.close(outputs[1])
            os.close(errors[1])
        self.stdout: TextIO = os.fdopen(outputs[0])
        self.stderr: TextIO = os.fdopen(errors[0])
        self.returncode: int | None = None
        # Its end can be waited for by anybody; its exit code only by its parent.
        self._ends = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """Give the exit code, or None while it runs."""
        with suppress(TimeoutError):
            self.wait(timeout=0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; give the exit code, or minus the signal. TimeoutError if it is late."""
        if self.returncode is None:
            if not select.select([self._ends], [], [], timeout)[0]:
                raise TimeoutError(f"process {self.pid} has not ended in {timeout} s")
            self.returncode = int(asked("warm", ("wait", self.pid)))
            os.close(self._ends)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read both outputs to their ends, and wait for the end; it is killed if it is late."""
        with ThreadPoolExecutor(max_workers=2) as readers:
            told = [readers.submit(_read, file) for file in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except TimeoutError:
                self.kill()
                raise
            out, err = (each.result() for each in told)
        return out, err

    def __enter__(self) -> WarmProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self.communicate()


def _read(file: TextIO) -> str:
    if file.closed:
        return ""
    with file:
        return file.read()
