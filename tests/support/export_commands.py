"""The export commands as processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from export import gguf_cli, hf_cli
from tests.support.commands import REPOSITORY, Ended
from trainer.command_cli import answer, new_app

TIMEOUT_SECONDS = 120


def start(command: str, *arguments: object) -> subprocess.Popen[str]:
    """Start `hf` or `gguf`, with one thread."""
    return subprocess.Popen(
        [sys.executable, "-m", f"export.{command}_cli", *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(command: str, *arguments: object) -> Ended:
    """Run `hf` or `gguf` to its end."""
    process = start(command, *arguments)
    out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    return Ended(code=process.returncode, out=out, err=err)


def run_here(capsys: pytest.CaptureFixture[str], command: str, *arguments: object) -> Ended:
    """Run `hf` or `gguf` in this process: what does not depend on a process of its own."""
    module = {"hf": hf_cli, "gguf": gguf_cli}[command]
    app = new_app(module.command, module.HELP)
    capsys.readouterr()
    code = answer(app, list(map(str, arguments)), f"export-{command}")
    captured = capsys.readouterr()
    return Ended(code=code, out=captured.out, err=captured.err)


def names_in(folder: Path) -> list[str]:
    """List what lies in a folder, hidden names too."""
    return sorted(path.name for path in folder.iterdir())
