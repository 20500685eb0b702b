"""Does every command end well when an interrupt comes before it is imported?"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.commands import REPOSITORY
from trainer import entry_cli

RAISED = "import signal\nsignal.raise_signal(signal.SIGINT)\n"
# Python prints what the callback of a weak reference raises, and goes on.
SWALLOWED = """import signal, weakref
class Watched: pass
watched = Watched()
watch = weakref.ref(watched, lambda _: signal.raise_signal(signal.SIGINT))
del watched
"""
MAIN = "def main():\n    print('went on')\n"
HEAVY = {"numpy", "rich", "torch", "typer", "shardb"}


def scripts() -> dict[str, str]:
    text = (REPOSITORY / "pyproject.toml").read_text()
    found: dict[str, str] = tomllib.loads(text)["project"]["scripts"]
    return found


@pytest.mark.parametrize("arrives", [RAISED, SWALLOWED], ids=["raised", "swallowed"])
def test_is_an_interrupt_of_the_imports_one_line(
    arrives: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"begun_{len(arrives)}"
    (tmp_path / f"{name}.py").write_text(arrives + MAIN)
    with pytest.raises(SystemExit) as ended:
        entry_cli.begin(name)
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", "error: interrupted\n")


def test_does_a_command_begin_that_nobody_interrupts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "begun_alone.py").write_text(MAIN)
    entry_cli.begin("begun_alone")
    assert capsys.readouterr() == ("went on\n", "")


def test_does_each_command_begin_before_what_takes_long() -> None:
    modules = {target.partition(":")[0] for target in scripts().values()}
    program = f"import sys, {', '.join(sorted(modules))}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert modules <= set(done.stdout.split())
    assert HEAVY.isdisjoint(done.stdout.split())


@pytest.mark.parametrize("command", scripts())
def test_is_each_command_the_one_of_its_name(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, function = scripts()[command].partition(":")
    begun: list[str] = []
    entry = importlib.import_module(module)
    monkeypatch.setattr(entry, "begin", begun.append)
    getattr(entry, function)()
    assert function == command.replace("-", "_")
    (name,) = begun
    found = importlib.import_module(name)
    assert callable(found.main)
    text = Path(str(found.__file__)).read_text()
    assert f'"{command}"' in text or f"`{command}`" in text
