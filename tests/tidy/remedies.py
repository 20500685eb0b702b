"""Which flags the texts of the sources name, and which flags commands have.

Owns the reading of both. A text is a string with a space in it that is no docstring: what is
printed, raised or shown in a help. A flag belongs to the command that the same text names before
it, as in `train --store run`, else to a command whose user can meet the text.
"""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from types import ModuleType
from typing import Any

import typer

from shardb.cli import VERBS
from tests.tidy.source import REPOSITORY, Source
from trainer.command_cli import new_app

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
# Styles of a page, not flags.
PAGES = ("trainer/report_html.py", "trainer/report_html_script.py")
# Flags of git, pip and Python's own package files.
FOREIGN = frozenset(("--hash", "--no-deps"))
# Who meets the texts of a folder's modules; the first prefix that fits counts.
READERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("trainer/data_cli.py", ("train-data",)),
    ("trainer/data/", ("train-data", "train", "repack_tokens")),
    ("trainer/generate", ("train-generate",)),
    ("trainer/report_", ("train-report",)),
    ("trainer/", ("train",)),
    ("export/import_", ("import-hf",)),
    ("export/doctor", ("model-doctor",)),
    ("export/gguf", ("export-gguf",)),
    ("export/verify", ("export-hf", "model-doctor")),
    ("export/", ("export-hf", "export-gguf", "import-hf", "model-doctor")),
    ("serve/", ("serve",)),
    ("shardb/cli/", ("shardb",)),
    ("shardb/", ("shardb", "train", "serve", "export-hf")),
    ("tools/", ("tools", "shardb", "train")),
)
Flags = Mapping[str, frozenset[str]]


def texts_of(source: Source) -> Iterator[tuple[int, str]]:
    """Yield line and text of every string that a person may read; values in it are `{}`."""
    skipped = {id(node) for node in _docstrings(source.tree)}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else "{}" for p in node.values]
            skipped |= {id(part) for part in node.values}
            text = "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = "" if id(node) in skipped else node.value
        else:
            continue
        if " " in text.strip():
            yield node.lineno, text


def wrong_flags(source: Source, flags: Flags) -> list[str]:
    """List the flags that a source's texts name and no command has that they can mean."""
    readers = readers_of(source)
    found = []
    for line, text in () if source.path in PAGES else texts_of(source):
        for match in FLAG.finditer(text):
            named = _command_before(text[: match.start()], flags)
            meant = [named] if named else readers
            if match[0] not in FOREIGN and not any(match[0] in flags[command] for command in meant):
                found.append(
                    f"{source.path}:{line}: {match[0]} is no flag of {' or '.join(meant)}:"
                    " name one that it has, or the command that it is a flag of"
                )
    return found


def readers_of(source: Source) -> list[str]:
    """Give the commands whose users meet a source's texts."""
    return list(next(names for prefix, names in READERS if source.path.startswith(prefix)))


def imported_texts(tool: Source, sources: Mapping[str, Source]) -> Iterator[tuple[Source, str]]:
    """Yield the texts of what a tool imports of `trainer.data`: its users meet them."""
    for node in ast.walk(tool.tree):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
            "trainer.data."
        ):
            continue
        source = sources[f"{(node.module or '').replace('.', '/')}.py"]
        names = {alias.name for alias in node.names}
        for defined in source.tree.body:
            if isinstance(defined, ast.FunctionDef | ast.ClassDef) and defined.name in names:
                part = Source(path=source.path, text="", tree=defined)
                yield from ((source, text) for _, text in texts_of(part))


@cache
def flags_of_commands() -> Flags:
    """Give every flag of every installed command; of `shardb`, those of all verbs."""
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    found = {}
    for name, place in scripts.items():
        begins = importlib.import_module(place.split(":")[0])
        found[name] = _options(_app_of(importlib.import_module(begins.MODULES[name])))
    from shardb.cli import app

    group: Any = typer.main.get_command(app)
    for verb in VERBS:
        found[f"shardb {verb}"] = _parameters(group.commands[verb])
    return found


def flags_of_tool(source: Source) -> frozenset[str]:
    """Give the flags that a tool's own parser takes."""
    named = (
        argument.value
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "add_argument"
        for argument in node.args
        if isinstance(argument, ast.Constant)
    )
    return frozenset(flag for flag in named if str(flag).startswith("--")) | {"--help"}


def _app_of(module: ModuleType) -> typer.Typer:
    if hasattr(module, "app"):
        app: typer.Typer = module.app
        return app
    if module.__name__ == "trainer.cli":
        return new_app(module._command(None), "")
    return new_app(module.command, "")


def _options(app: typer.Typer) -> frozenset[str]:
    command: Any = typer.main.get_command(app)
    each = [command, *getattr(command, "commands", {}).values()]
    return frozenset().union(*map(_parameters, each))


def _parameters(command: Any) -> frozenset[str]:
    named = (n for p in command.params for n in (*p.opts, *p.secondary_opts))
    return frozenset(name for name in named if name.startswith("--")) | {"--help"}


def _command_before(text: str, flags: Flags) -> str | None:
    """Give the command that a flag follows: within the same backticks, or on a line without any."""
    line = text.rsplit("\n", 1)[-1]
    *_, inside = line.split("`")
    if "`" in line and line.count("`") % 2 == 0:
        return None
    last, found = -1, None
    for name in flags:
        for match in re.finditer(rf"(?<![\w/.-]){re.escape(name)}(?= )", inside):
            if (match.start(), len(name)) > (last, len(found or "")):
                last, found = match.start(), name
    return found


def _docstrings(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            yield body[0].value
