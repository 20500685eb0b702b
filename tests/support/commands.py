"""The command `shardb` as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        return json.loads(self.out)


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
