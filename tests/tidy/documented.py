"""Which commands, flags, verbs and make targets the documents show, and which of them exist.

Owns the reading of fenced shell blocks and of code between backticks. Which flags a command has is
in `remedies`. A command on a line is checked with its own flags; a flag by itself has to be one of
any command or tool.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

from tests.tidy.remedies import FLAG, Flags, flags_of_tool
from tests.tidy.source import REPOSITORY, Source

# Flags of the program that starts and stops containers.
OF_OTHERS = frozenset(("--shm-size", "--time"))
# What a file begins with, and no call.
NO_CALLS = frozenset(("shardb commit 1",))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
MAKE = re.compile(r"^make ((?:[A-Z_]+=\S+ )*)([a-z][a-z-]*)(.*)")
VARIABLE = re.compile(r"(?<![\w$])([A-Z][A-Z_]+)(?==)")
TOOL = re.compile(r"^(?:.*\s)?(?:\S*/)?python3? -m (tools(?:\.\w+)+)")


@dataclass(frozen=True, kw_only=True)
class Known:
    """What there is: flags by command, flags by tool, targets and variables of the Makefile."""

    flags: Flags
    tools: Mapping[str, frozenset[str]]
    targets: Set[str]
    variables: Set[str]

    @property
    def every_flag(self) -> frozenset[str]:
        """Give the flags of all commands and tools."""
        return OF_OTHERS.union(*self.flags.values(), *self.tools.values())


def known(flags: Flags, sources: tuple[Source, ...]) -> Known:
    """Read what the tree has."""
    makefile = (REPOSITORY / "Makefile").read_text()
    tools = [source for source in sources if source.path.startswith("tools/")]
    return Known(
        flags=flags,
        tools={t.path.removesuffix(".py").replace("/", "."): _flags_of(t) for t in tools},
        targets=frozenset(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)),
        variables=frozenset(re.findall(r"\b[A-Z][A-Z_]+\b", makefile)),
    )


def _flags_of(tool: Source) -> frozenset[str]:
    """Give a tool's flags; where it gives itself some in a loop, every word may be one."""
    named = flags_of_tool(tool)
    if 'add_argument(f"--{' in tool.text:
        named |= {f"--{word}" for word in re.findall(r'"([a-z][a-z-]*)"', tool.text)}
    return named


def calls_in(text: str) -> Iterator[str]:
    """Yield each command line of a document's shell blocks, and all code between backticks."""
    for match in FENCE.finditer(text):
        if match[1] in ("sh", "bash", "console"):
            joined = re.sub(r"\\\n\s*", " ", match[2])
            for line in joined.splitlines():
                bare = re.sub(r"(^|\s)#.*", "", line).removeprefix("$ ")
                yield from (_bare(part) for part in re.split(r"&&|[;|&]", bare))
    for match in SPAN.finditer(FENCE.sub("", text)):
        yield _bare(match[1])


def _bare(call: str) -> str:
    return " ".join(call.split()).removeprefix(".venv/bin/")


def untrue_calls(path: str, text: str, there: Known) -> list[str]:
    """List what a document shows that nobody can type."""
    return [
        f"{path}: `{call}`: {fault}"
        for call in calls_in(text)
        for fault in (*_faults_of_make(call, there), *_faults_of_flags(call, there))
    ]


def _faults_of_make(call: str, there: Known) -> Iterator[str]:
    for before, target, after in MAKE.findall(call):
        if target not in there.targets:
            yield f"the Makefile has no target {target}"
        for name in VARIABLE.findall(f"{before} {after}"):
            if name not in there.variables:
                yield f"the Makefile has no variable {name}"


def _faults_of_flags(call: str, there: Known) -> Iterator[str]:
    name = _meant(call, there)
    verb = re.match(r"shardb ([a-z][a-z-]*)(?= |$)", call)
    if name == "shardb" and verb and call not in NO_CALLS:
        yield f"shardb has no verb {verb[1]}"
    elif name.startswith("tools.") and name not in there.tools:
        yield f"there is no {name}"
    elif name:
        flags = there.flags.get(name) or there.tools.get(name) or there.every_flag
        yield from (f"{f} is no flag of {name}" for f in FLAG.findall(call) if f not in flags)


def _meant(call: str, there: Known) -> str:
    """Give the command, verb or tool that a line calls; nothing where it is none of them."""
    if tool := TOOL.search(call):
        return tool[1]
    first, _, rest = call.partition(" ")
    if first.startswith("tools/") and first.endswith(".py"):
        return first.removesuffix(".py").replace("/", ".")
    if first.startswith("--"):
        return "any command"
    verb = f"{first} {rest.split(' ')[0]}"
    name = verb if verb in there.flags else first
    return name if name in there.flags else ""
