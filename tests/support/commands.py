"""The command `shardb`, as a process of its own or in the test's."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardb.cli import run

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PROGRAM = "from shardb.cli import main; main()"
TIMEOUT_SECONDS = 60


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended: its exit code and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The document on standard output."""
        return json.loads(self.out, parse_constant=pytest.fail)


class Ask:
    """Runs `shardb` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *arguments: object) -> Ended:
        self.capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = self.capsys.readouterr()
        return Ended(code=code, out=captured.out, err=captured.err)


def check_refused(answer: Ended, code: int, *words: str) -> None:
    """One line on standard error, the right code, no traceback."""
    assert answer.code == code, answer.err
    assert answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1
    for word in words:
        assert word in answer.err


def shardb_command(*arguments: object) -> Ended:
    """Run `shardb` with these arguments to its end."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    return Ended(code=done.returncode, out=done.stdout, err=done.stderr)
