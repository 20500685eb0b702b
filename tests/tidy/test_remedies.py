"""Does every flag that a text advises exist in the command whose user reads it?"""

from __future__ import annotations

import pytest

from tests.tidy.remedies import (
    FLAG,
    flags_of_commands,
    flags_of_tool,
    imported_texts,
    texts_of,
    wrong_flags,
)
from tests.tidy.source import Source, parse, python_sources

PACKAGES = ("trainer/", "export/", "serve/", "shardb/", "tools/")


def sources() -> list[Source]:
    return [s for s in python_sources() if s.path.startswith(PACKAGES)]


def all_flags() -> dict[str, frozenset[str]]:
    tools = [source for source in sources() if source.path.startswith("tools/")]
    own = {"repack_tokens": flags_of_tool(next(t for t in tools if t.stem == "repack_tokens"))}
    every = frozenset().union(*map(flags_of_tool, tools))
    return {**own, "tools": every, **flags_of_commands()}


def test_do_the_texts_name_flags_that_exist() -> None:
    flags = all_flags()
    assert [fault for source in sources() for fault in wrong_flags(source, flags)] == []
    named = sum(len(FLAG.findall(text)) for source in sources() for _, text in texts_of(source))
    assert named > 300, "the texts are found at all"


def test_has_a_tool_the_flags_that_what_it_calls_advises() -> None:
    by_path = {source.path: source for source in sources()}
    tools = [s for s in sources() if s.path == "tools/repack_tokens.py"]
    faults = [
        f"{tool.path}: {flag}, which {source.path} advises"
        for tool in tools
        for source, text in imported_texts(tool, by_path)
        for flag in FLAG.findall(text)
        if flag not in flags_of_tool(tool)
    ]
    assert faults == []
    assert tools


@pytest.mark.parametrize(
    ("path", "text", "is_wrong"),
    [
        ("trainer/x.py", "lower --micro-batch", True),
        ("trainer/x.py", "lower --micro-batch-size", False),
        ("trainer/x.py", "begin with `import-hf PACKAGE --store RUN`", False),
        ("trainer/x.py", "begin with `import-hf PACKAGE --micro-batch-size 3`", True),
        ("serve/x.py", "give --kv-cache-bytes", False),
        ("serve/x.py", "give --data-dir", True),
        ("shardb/cli/x.py", "see `shardb log run --metric loss`", False),
        ("shardb/cli/x.py", "see `shardb fsck run --metric loss`", True),
        ("trainer/data/x.py", "give --vocab", True),
    ],
)
def test_is_a_flag_that_no_command_has_caught(path: str, text: str, is_wrong: bool) -> None:
    for written in (f"raise InputError({text!r})", f'raise InputError(f"{{1}} {text}")'):
        assert bool(wrong_flags(parse(path, written), all_flags())) is is_wrong


def test_is_a_tool_caught_that_lacks_a_flag_of_what_it_calls() -> None:
    called = parse("trainer/data/x.py", "def refuse():\n    raise E('give another --out')\n")
    tool = parse("tools/t.py", "from trainer.data.x import refuse\np.add_argument('--in')\n")
    assert "--out" not in flags_of_tool(tool)
    assert [text for _, text in imported_texts(tool, {called.path: called})] == [
        "give another --out"
    ]
