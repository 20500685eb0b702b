"""One source file as the tidy rules see it: path, text, syntax tree.

Owns which files are looked at. Knows no rule. A rule is a function from a `Source` to findings,
each "path:line: what is wrong and what to do", so that a rule can be shown a bad snippet as well
as the tree: a rule that never fails proves nothing.
"""

from __future__ import annotations

import ast
import gc
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("shardb", "trainer", "export", "serve")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".sh", ".cfg", ".yml", ".yaml", ".json", ""}


@dataclass(frozen=True, kw_only=True)
class Source:
    """A Python file: `path` is relative to the repository, with forward slashes."""

    path: str
    text: str
    tree: ast.Module = field(repr=False)

    @property
    def stem(self) -> str:
        return PurePosixPath(self.path).stem

    @property
    def package(self) -> str:
        """Give the top folder: shardb, trainer, export, serve, tools or tests."""
        return self.path.split("/", 1)[0]

    @property
    def is_command(self) -> bool:
        """Say whether this module is a command line: cli.py, x_cli.py or a file under cli/."""
        folders = PurePosixPath(self.path).parts[:-1]
        return self.stem == "cli" or self.stem.endswith("_cli") or "cli" in folders

    def at(self, node: ast.AST, message: str) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {message}"


Rule = Callable[[Source], list[str]]


def parse(path: str, text: str) -> Source:
    """Make a source of a path and its text, for the tree and for bad snippets alike."""
    return Source(path=path, text=text, tree=ast.parse(text, filename=path))


@cache
def project_files() -> tuple[str, ...]:
    """List every file git tracks or would add, or the whole tree where there is no git."""
    command = ["git", "-C", str(REPOSITORY), "ls-files", "-co", "--exclude-standard", "-z"]
    answer = subprocess.run(command, capture_output=True, check=False)
    if answer.returncode == 0:
        names = [name for name in answer.stdout.decode().split("\0") if name]
    else:
        names = [str(p.relative_to(REPOSITORY)) for p in REPOSITORY.rglob("*") if p.is_file()]
        names = [name for name in names if not name.startswith(".") or name.startswith(".ci/")]
    return tuple(sorted(name for name in names if (REPOSITORY / name).is_file()))


@cache
def python_sources() -> tuple[Source, ...]:
    """Parse every Python file of the project.

    The trees are millions of objects that stay to the end of the session: looked through again and
    again by the collector, they take four times as long to make, and a second at each collection.
    """
    names = [name for name in project_files() if name.endswith(".py")]
    gc.disable()
    try:
        return tuple(parse(name, (REPOSITORY / name).read_text()) for name in names)
    finally:
        gc.enable()
        gc.freeze()


def text_files() -> Iterator[tuple[str, str]]:
    """Give path and text of every text file of the project."""
    for name in project_files():
        if PurePosixPath(name).suffix in TEXT_SUFFIXES and name != "LICENSE":
            yield name, (REPOSITORY / name).read_text(encoding="utf-8", errors="replace")


def findings(rule: Rule, sources: Sequence[Source] | None = None) -> list[str]:
    """Collect what a rule finds over the project, or over the given sources."""
    chosen = python_sources() if sources is None else sources
    return [finding for source in chosen for finding in rule(source)]


def dotted(node: ast.AST) -> str:
    """Give `a.b.c` for a chain of attributes on a name, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Give every function and method, nested ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
