"""The export commands as processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from export import doctor_cli, gguf_cli, hf_cli
from tests.support.commands import Ended
from tests.support.warm_process import WarmProcess
from trainer.command_cli import answer, new_app

TIMEOUT_SECONDS = 120
_COMMANDS = {
    "hf": ("export-hf", hf_cli),
    "gguf": ("export-gguf", gguf_cli),
    "doctor": ("model-doctor", doctor_cli),
}


def start(command: str, *arguments: object) -> WarmProcess:
    """Start `hf` or `gguf`, with one thread."""
    return WarmProcess(f"export.{command}_cli", arguments)


def run(command: str, *arguments: object) -> Ended:
    """Run `hf` or `gguf` to its end."""
    with start(command, *arguments) as process:
        out, err = process.communicate(timeout=TIMEOUT_SECONDS)
        return Ended(code=process.wait(), out=out, err=err)


def run_here(capsys: pytest.CaptureFixture[str], command: str, *arguments: object) -> Ended:
    """Run `hf`, `gguf` or `doctor` in this process: what needs no process of its own."""
    name, module = _COMMANDS[command]
    app = new_app(module.command, module.HELP)
    capsys.readouterr()
    code = answer(app, list(map(str, arguments)), name)
    captured = capsys.readouterr()
    return Ended(code=code, out=captured.out, err=captured.err)


def names_in(folder: Path) -> list[str]:
    """List what lies in a folder, hidden names too."""
    return sorted(path.name for path in folder.iterdir())
