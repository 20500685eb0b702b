"""Data of a tiny run, and places for a durable and an active store."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardb.filesystem import RealFileSystem
from tests.support.store_fixtures import active
from tests.support.training import arguments, make_data, train_here

__all__ = ["active", "data", "plain", "store"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write rows to train on and to validate with."""
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a place for the durable store, taken for a disk wherever tests are run."""
    kind = RealFileSystem.kind

    def on_disk(files: RealFileSystem, path: str) -> str:
        return "disk" if path.startswith(str(tmp_path)) else kind(files, path)

    monkeypatch.setattr(RealFileSystem, "kind", on_disk)
    return tmp_path / "run"


@pytest.fixture(scope="module")
def plain(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train eight steps in one store."""
    store = tmp_path_factory.mktemp("plain") / "run"
    assert train_here(arguments(store, data, "--max-steps", "8")) == 0
    return store
