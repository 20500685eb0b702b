"""Are files and functions small, names honest, modules without effects, tests able to fail?"""

from __future__ import annotations

import pytest

from tests.tidy.source import Rule, findings, parse
from tests.tidy.style import (
    FILE_RATCHET,
    FUNCTION_RATCHET,
    STYLE_RULES,
    banned_names,
    file_sizes,
    function_sizes,
    long_lines,
    module_effects,
    silent_tests,
    stray_output,
    unsorted_exports,
)

LONG_FUNCTION = "def f():\n" + "    x = 1\n" * 70
BAD = [
    (file_sizes, "shardb/store.py", "x = 1\n" * 401),
    (function_sizes, "shardb/store.py", LONG_FUNCTION),
    (
        function_sizes,
        "shardb/store.py",
        "class A:\n    async " + "def f(self):\n" + "        1\n" * 71,
    ),
    (long_lines, "shardb/store.py", f"x = '{'a' * 100}'"),
    (banned_names, "shardb/utils.py", "x = 1"),
    (banned_names, "tests/unit/test_helpers.py", "x = 1"),
    (banned_names, "trainer/misc/a.py", "x = 1"),
    (banned_names, "trainer/a.py", "class StoreManager: pass"),
    (module_effects, "shardb/a.py", "def f():\n    global x\n    x = 1"),
    (module_effects, "shardb/a.py", "import torch\ntorch.set_num_threads(1)"),
    (module_effects, "shardb/a.py", "import os\nos.environ['A'] = '1'"),
    (module_effects, "shardb/a.py", "for x in range(3):\n    pass"),
    (module_effects, "shardb/a.py", "with open('a') as f:\n    pass"),
    (module_effects, "shardb/a.py", "x = 0\nx += 1"),
    (module_effects, "shardb/a.py", "CACHE = {}\ndef f(k):\n    CACHE[k] = 1"),
    (module_effects, "shardb/a.py", "SEEN = []\ndef f(k):\n    SEEN.append(k)"),
    (module_effects, "shardb/cli.py", "import torch\ntorch.set_num_threads(1)"),
    (stray_output, "shardb/store.py", "def f():\n    print('x')"),
    (stray_output, "trainer/run.py", "import sys\ndef f():\n    sys.stdout.write('x')"),
    (silent_tests, "tests/unit/test_a.py", "def test_a():\n    run()"),
    (silent_tests, "tests/unit/test_a.py", "class TestA:\n    def test_a(self):\n        run()"),
    (silent_tests, "tests/unit/test_a.py", "def test_a():\n    assert True"),
    (unsorted_exports, "shardb/__init__.py", "__all__ = ['b', 'a']"),
    (unsorted_exports, "shardb/__init__.py", "__all__ = ['a', 'a']"),
    (unsorted_exports, "shardb/__init__.py", "__all__ = [n for n in dir()]"),
]
GOOD = [
    ("shardb/store.py", '"""Doc."""\nLIMIT = 3\nNAMES: dict[str, int] = {}\nx = len("a")'),
    ("shardb/store.py", "def f():\n    seen = []\n    seen.append(1)\n    return seen"),
    ("shardb/cli.py", "import typer\napp = typer.Typer()\napp.add_typer(app)\nprint"),
    ("trainer/progress.py", "def f():\n    print('x')"),
    ("tests/unit/test_a.py", "def test_a():\n    with pytest.raises(ValueError):\n        f()"),
    ("tests/unit/test_a.py", "def test_a():\n    np.testing.assert_equal(f(), 1)"),
    ("tests/unit/test_a.py", "def test_a():\n    assert f() == 1"),
    ("tests/unit/test_a.py", "def test_a():\n    check(f())"),
    ("tests/unit/test_a.py", f"x = '{'a' * 90}'  # type: ignore[index]"),
    ("shardb/__init__.py", "__all__ = ['A', 'a', 'b']"),
]


@pytest.mark.parametrize("rule", STYLE_RULES)
def test_does_the_tree_keep_the_rule(rule: Rule) -> None:
    assert findings(rule) == []


@pytest.mark.parametrize(("rule", "path", "text"), BAD)
def test_is_bad_style_caught(rule: Rule, path: str, text: str) -> None:
    assert findings(rule, [parse(path, text)]) != []


@pytest.mark.parametrize(("path", "text"), GOOD)
def test_is_good_style_let_through(path: str, text: str) -> None:
    source = parse(path, text)
    text_rules = [rule for rule in STYLE_RULES if rule is not module_effects or "print" not in text]
    assert [finding for rule in text_rules for finding in rule(source)] == []


def test_has_every_rule_a_control_arm() -> None:
    assert {rule for rule, _, _ in BAD} == set(STYLE_RULES)


@pytest.mark.parametrize(
    ("lines", "message"), [(451, "grew"), (449, "shrank"), (399, "drop its exception")]
)
def test_can_an_exception_only_shrink(lines: int, message: str) -> None:
    [finding] = file_sizes(parse("shardb/store.py", "x = 1\n" * lines), {"shardb/store.py": 450})
    assert message in finding


def test_does_an_exact_exception_hold() -> None:
    source = parse("shardb/store.py", "x = 1\n" * 450)
    assert file_sizes(source, {"shardb/store.py": 450}) == []


def test_is_every_exception_still_in_the_tree(repository_paths: set[str]) -> None:
    named = {*FILE_RATCHET, *(name.split("::")[0] for name in FUNCTION_RATCHET)}
    assert named <= repository_paths
