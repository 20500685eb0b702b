"""Is what users hold on to pinned: the names of the API, the commands, their help?"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import shardb
from shardb.cli import run as shardb_run
from shardb.errors import EXIT_CODES
from tests.tidy.wording import console_scripts
from trainer.data_cli import run as data_run

# Adding a name is a decision; taking one away breaks somebody. Change this list with a reason.
API = [
    "Commit",
    "ReadView",
    "RecoveryReport",
    "ShardEntry",
    "ShardView",
    "ShardbError",
    "StagedShard",
    "Store",
    "TensorSpec",
    "Transaction",
    "open",
]
VERBS = [
    *["init", "info", "log", "ls", "show", "snapshot", "recover", "fsck", "gc"],
    *["pack", "unpack", "du"],
    *["branch", "branches", "rewind", "rm", "policy", "cat", "diff", "repair"],
]
CALLS = [
    ["serve"],
    ["train"],
    ["train-data"],
    ["train-data", "prepare"],
    ["train-data", "inspect"],
    ["train-generate"],
    ["train-report"],
    ["import-hf"],
    ["export-hf"],
    ["export-gguf"],
    ["model-doctor"],
    *[["shardb", verb] for verb in VERBS],
]
# Commands of many verbs, whose functions do nothing to the process that calls them.
RUN_HERE: dict[str, Callable[[list[str]], int]] = {"shardb": shardb_run, "train-data": data_run}


def help_of(repository: Path, call: list[str], preamble: str = "") -> str:
    """Run `CALL --help` in an interpreter of its own, wide enough that no line is broken."""
    scripts = dict(re.findall(r'^([\w-]+) = "([\w.]+:\w+)"$', pyproject(repository), re.MULTILINE))
    module, function = scripts[call[0]].split(":")
    script = f"import sys; sys.argv = {[*call, '--help']!r}\n{preamble}\n"
    script += f"from {module} import {function} as main; sys.exit(main())"
    environment = {**os.environ, "COLUMNS": "200", "TERMINAL_WIDTH": "200", "NO_COLOR": "1"}
    command = [sys.executable, "-c", script]
    answer = subprocess.run(command, cwd=repository, env=environment, capture_output=True)
    assert answer.returncode == 0, answer.stderr.decode()
    return answer.stdout.decode()


def pyproject(repository: Path) -> str:
    return (repository / "pyproject.toml").read_text()


def missing_from_help(text: str) -> list[str]:
    """List what a help owes and does not have: examples, and every exit code with its meaning."""
    flat = " ".join(text.split())
    # What follows a semicolon says what an interrupt leaves, and each command knows its own.
    owed = [f"{code} {meaning.split(';')[0]}" for code, meaning in EXIT_CODES.items()]
    return [words for words in ("Examples:", "Exit codes:", *owed) if words not in flat]


def test_is_the_api_what_it_was() -> None:
    assert shardb.__all__ == API
    assert [name for name in API if not hasattr(shardb, name)] == []


def test_do_package_and_module_tell_one_version(repository: Path) -> None:
    assert f'version = "{shardb.__version__}"' in pyproject(repository)


def test_can_every_command_be_imported(repository: Path) -> None:
    text = pyproject(repository)
    targets = re.findall(r'^[\w-]+ = "([\w.]+):(\w+)"$', text, re.MULTILINE)
    assert len(targets) >= len(console_scripts(text))
    for module, function in targets:
        assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_does_the_help_have_examples_and_exit_codes(
    repository: Path,
    call: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if call[0] in RUN_HERE:
        monkeypatch.setenv("COLUMNS", "200")
        assert RUN_HERE[call[0]]([*call[1:], "--help"]) == 0
        text = capsys.readouterr().out
        assert f"Usage: {' '.join(call)}" in text
    else:
        text = help_of(repository, call)
    assert missing_from_help(text) == []


def test_is_a_poor_help_caught() -> None:
    assert "Examples:" in missing_from_help("Usage: train\nExit codes:\n 0 fine")
    assert "2 usage or bad input" in missing_from_help("Examples: Exit codes: 0 fine")


@pytest.mark.parametrize(
    "command",
    [
        "serve",
        "train",
        "train-data",
        "train-generate",
        "train-report",
        "shardb",
        "import-hf",
        "export-hf",
        "export-gguf",
        "model-doctor",
    ],
)
def test_does_help_come_without_loading_torch(repository: Path, command: str) -> None:
    refuse = "sys.modules['torch'] = None"
    assert command in help_of(repository, [command], preamble=refuse)
