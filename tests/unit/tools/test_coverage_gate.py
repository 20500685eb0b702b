"""Does `make coverage` name what exists, and fail when something is not reached?"""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import coverage_gate


def test_is_every_module_named_once_and_there() -> None:
    modules = coverage_gate.modules()
    assert len(modules) == len(set(modules)) > 30
    assert all((coverage_gate.REPOSITORY / path).is_file() for path in modules)
    for path in (coverage_gate.REPOSITORY / "shardb").glob("repair*.py"):
        assert path.relative_to(coverage_gate.REPOSITORY).as_posix() in modules


def test_are_the_tests_there() -> None:
    words = coverage_gate.tests()
    paths = [word.partition("::")[0] for word in words if word != "--deselect"]
    assert all((coverage_gate.REPOSITORY / path).exists() for path in paths)


def test_does_it_fail_when_a_branch_is_not_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The control arm: one module, and one test of it."""
    pytest.importorskip("coverage")
    monkeypatch.setattr(coverage_gate, "modules", lambda: ["shardb/retention.py"])
    data = str(tmp_path / "data")
    assert coverage_gate.measure(["tests/unit/shardb/test_retention.py"], data) == 0
    assert coverage_gate.report(data) != 0
    assert "retention.py" in capfd.readouterr().out
