"""The command `shardb` in this process, and a store with a known history for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import Ask
from tests.support.small_stores import copy_store, fill_store


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with steps 0 to 6, of which 2, 5 and 6 are retained; never changed."""
    root = tmp_path_factory.mktemp("whole") / "run"
    fill_store(root, range(7), snapshots=(2,))
    return root


@pytest.fixture(scope="session")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of steps 0 to 11 whose log has several closed segments; never changed."""
    root = tmp_path_factory.mktemp("long") / "run"
    fill_store(root, range(12), snapshots=(3,), segment_bytes=3000)
    return root


@pytest.fixture
def run(whole: Path, root: Path) -> Path:
    """A copy of the store."""
    return copy_store(whole, root)


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No store in the environment, the current directory or the cache of checks."""
    monkeypatch.delenv("SHARDB_STORE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run a command in this process."""
    return Ask(capsys)
