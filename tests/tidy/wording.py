"""The rules for texts: the project speaks of itself alone, and what it names exists.

Owns words that would tie a text to one machine, and the links of the documents.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable

from tests.tidy.source import REPOSITORY

# A path or host of one machine is wrong on every other. Split, so that this file is clean itself.
FOREIGN_WORDS = (
    "/wo" + "rk/",
    "/ro" + "ot/",
    "/ho" + "me/",
    "/opt/" + "wheels",
    "py" + "pi.org",
    "python" + "hosted",
    ".." + "/shared",
    "sand" + "box",
)
# Names that others chose: an option of a browser, which a test of a page has to give, and the part
# of a template library that renders templates of strangers.
NAMES_OF_OTHERS = ("--no-sand" + "box", "jinja2.sand" + "box", "immutablesand" + "boxedenvironment")
NAMED_FILE = re.compile(r"`((?:shardb|trainer|export|serve|tools|tests)/[\w./]*)`")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)|!\[[^\]]*\]\(([^)\s]+)\)")


def foreign_words(path: str, text: str) -> list[str]:
    """Refuse a word that belongs to one machine or to a package host."""
    return [
        f"{path}:{number}: '{word}' belongs to one machine, not to this project"
        for number, line in enumerate(text.splitlines(), 1)
        for word in FOREIGN_WORDS
        if word in _own_words(line)
    ]


def _own_words(line: str) -> str:
    line = line.lower()
    for name in NAMES_OF_OTHERS:
        line = line.replace(name, "")
    return line


def broken_links(path: str, text: str) -> list[str]:
    """Refuse a relative link in a document to a file that is not there."""
    if not path.endswith(".md"):
        return []
    folder = (REPOSITORY / path).parent
    found = []
    for match in LINK.finditer(text):
        target = match.group(1) or match.group(2)
        is_outside = "://" in target or target.startswith("mailto:")
        if not is_outside and not (folder / target).exists():
            found.append(f"{path}: link to {target}, which does not exist")
    return found


def missing_files(path: str, text: str) -> list[str]:
    """Refuse a document that names a source file or folder that is not there."""
    if not path.endswith(".md") or path == "CHANGELOG.md":
        return []
    return [
        f"{path}: names {name}, which does not exist"
        for name in NAMED_FILE.findall(text)
        if not (REPOSITORY / name).exists()
    ]


def console_scripts(pyproject_text: str) -> list[str]:
    """List the commands the package installs."""
    return sorted(tomllib.loads(pyproject_text)["project"]["scripts"])


def undocumented_commands(commands: Iterable[str], texts: Iterable[str]) -> list[str]:
    """Refuse a command that no document shows as code."""
    documents = "\n".join(texts)
    return [
        f"{command}: no document mentions it"
        for command in commands
        if not re.search(rf"(?:`|^|\s){re.escape(command)}(?=`|\s)", documents, re.MULTILINE)
    ]
