"""The style rules that a linter does not know: sizes, names, effects, output, assertions.

Owns the limits and their ratchets: an exception is a number that may only fall. Knows nothing of
who may import whom.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import PurePosixPath

from tests.tidy.source import PACKAGES, Source, dotted, functions

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70
LINE_CHARACTERS_MAX = 100

# Exceptions of today, with their present size. A number may fall and an entry may go; a number
# that grows or an entry that is no longer needed fails the test.
FILE_RATCHET: Mapping[str, int] = {}
FUNCTION_RATCHET: Mapping[str, int] = {}

BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "handler", "misc"}
PRINTING_STEMS = {"progress", "report"}
CHECKER_NOTE = re.compile(r"\s*# (?:type: ignore|noqa).*$")
MUTATORS = {
    "append", "add", "update", "pop", "popitem", "setdefault", "extend", "clear", "remove",
    "discard", "insert",
}  # fmt: skip


def file_sizes(source: Source, ratchet: Mapping[str, int] = FILE_RATCHET) -> list[str]:
    """Refuse a file over the limit, or over its shrinking exception."""
    lines = len(source.text.splitlines())
    return _sized(source, source.tree, source.path, lines, FILE_LINES_MAX, ratchet)


def function_sizes(source: Source, ratchet: Mapping[str, int] = FUNCTION_RATCHET) -> list[str]:
    """Refuse a function over the limit, counted from `def` to its last line."""
    found = []
    for function in functions(source.tree):
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        name = f"{source.path}::{function.name}"
        found += _sized(source, function, name, lines, FUNCTION_LINES_MAX, ratchet)
    return found


def _sized(
    source: Source, node: ast.AST, name: str, lines: int, limit: int, ratchet: Mapping[str, int]
) -> list[str]:
    exception = ratchet.get(name)
    if exception is None:
        message = f"{name} has {lines} lines, limit {limit}"
        return [source.at(node, message)] if lines > limit else []
    if lines > exception:
        return [source.at(node, f"{name} grew from {exception} to {lines} lines; split it")]
    if lines <= limit:
        return [source.at(node, f"{name} is within the limit: drop its exception")]
    if lines < exception:
        return [source.at(node, f"{name} shrank to {lines} lines: lower its exception")]
    return []


def long_lines(source: Source) -> list[str]:
    """Refuse a line of more than 100 characters, not counting a note to a checker at its end."""
    return [
        f"{source.path}:{number}: {len(line)} characters, limit {LINE_CHARACTERS_MAX}"
        for number, line in enumerate(source.text.splitlines(), 1)
        if len(CHECKER_NOTE.sub("", line)) > LINE_CHARACTERS_MAX
    ]


def banned_names(source: Source) -> list[str]:
    """Refuse drawers: a module, class or function named for nothing in particular."""
    found = [
        f"{source.path}:1: '{part}' names a drawer; say what it owns"
        for part in PurePosixPath(source.path.removesuffix(".py")).parts
        if set(part.split("_")) & BANNED_NAMES
    ]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef):
            lower = node.name.lower()
            if any(lower.endswith(word) for word in BANNED_NAMES if word != "common"):
                found.append(source.at(node, f"'{node.name}' says nothing; say what it owns"))
    return found


def module_effects(source: Source) -> list[str]:
    """Refuse `global`, import-time calls and statements, and module state that functions change."""
    if source.package not in {*PACKAGES, "tools"}:
        return []
    found = [
        source.at(node, "no `global`: pass it as an argument")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Global)
    ]
    found += [
        source.at(statement, "runs at import time: put it into a function")
        for statement in source.tree.body
        if not _declares(statement, source)
    ]
    return found + _changed_module_state(source)


def _declares(statement: ast.stmt, source: Source) -> bool:
    """Say whether a module-level statement only declares something."""
    match statement:
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=function)):
            # `app.add_typer(...)` builds the command line out of objects of the same module.
            return source.is_command and dotted(function).split(".")[0] in _assigned(source.tree)
        case ast.If(test=test):
            text = ast.unparse(test)
            return text == "TYPE_CHECKING" or text.startswith(("__name__", "sys.version_info"))
        case ast.Assign(targets=targets):
            return all(isinstance(target, ast.Name | ast.Tuple) for target in targets)
        case ast.AnnAssign(target=target):
            return isinstance(target, ast.Name)
        case ast.Try(body=body):
            return all(isinstance(inner, ast.Import | ast.ImportFrom) for inner in body)
    return isinstance(
        statement,
        ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef,
    )


def _assigned(tree: ast.Module) -> set[str]:
    names = set()
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def _changed_module_state(source: Source) -> list[str]:
    state = _assigned(source.tree)
    found = []
    for function in functions(source.tree):
        local = {
            node.id
            for node in ast.walk(function)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        } | {argument.arg for argument in ast.walk(function) if isinstance(argument, ast.arg)}
        for node in ast.walk(function):
            name = _changed_name(node)
            if name in state and name not in local:
                found.append(source.at(node, f"'{name}' is module state; pass it as an argument"))
    return found


def _changed_name(node: ast.AST) -> str:
    match node:
        case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
            return name
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attribute)):
            return name if attribute in MUTATORS else ""
    return ""


def stray_output(source: Source) -> list[str]:
    """Refuse printing by anything that is not a command, a progress display or a tool."""
    talks = source.is_command or source.stem in PRINTING_STEMS
    if source.package not in PACKAGES or talks:
        return []
    names = {"print", "sys.stdout.write", "sys.stderr.write", "pprint", "breakpoint"}
    return [
        source.at(node, f"{dotted(node.func)}() outside a command: return the value instead")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and dotted(node.func) in names
    ]


def silent_tests(source: Source) -> list[str]:
    """Refuse a test that asserts nothing, or only a constant: it cannot fail."""
    if source.package != "tests":
        return []
    return [
        source.at(function, f"{function.name} asserts nothing, so it cannot fail")
        for function in functions(source.tree)
        if function.name.startswith("test_") and not any(map(_asserts, ast.walk(function)))
    ]


def _asserts(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert):
        return not isinstance(node.test, ast.Constant)
    if not isinstance(node, ast.Call):
        return False
    name = dotted(node.func) or (node.func.attr if isinstance(node.func, ast.Attribute) else "")
    last = name.rsplit(".", 1)[-1]
    is_pytest = name in {"pytest.raises", "pytest.warns", "pytest.fail"}
    return is_pytest or last == "check" or last.startswith(("check_", "assert_", "expect_"))


def unsorted_exports(source: Source) -> list[str]:
    """Refuse an `__all__` that is computed, unsorted or doubled."""
    found = []
    for statement in source.tree.body:
        if isinstance(statement, ast.Assign) and dotted(statement.targets[0]) == "__all__":
            try:
                names = list(ast.literal_eval(statement.value))
            except ValueError:
                found.append(source.at(statement, "__all__ must be a literal list of names"))
                continue
            if names != sorted(set(names)):
                found.append(source.at(statement, "__all__ must be sorted, each name once"))
    return found


STYLE_RULES = (
    file_sizes,
    function_sizes,
    long_lines,
    banned_names,
    module_effects,
    stray_output,
    silent_tests,
    unsorted_exports,
)
