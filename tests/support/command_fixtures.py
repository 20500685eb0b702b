"""Fixtures of tests that run `shardb` in their own process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import Ask


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No store in the environment, the current directory or the cache of checks."""
    monkeypatch.delenv("SHARDB_STORE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run a command in this process."""
    return Ask(capsys)
