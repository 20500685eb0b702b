"""Stores in a temporary directory, and two with a known history that are only ever copied."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.damage import Known
from tests.support.small_stores import copy_store, fill_store
from tests.support.store_fixtures import medium, quick_path, root, store

__all__ = ["known", "long", "medium", "quick_path", "root", "run", "store", "whole"]


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with steps 0 to 6, of which 2, 5 and 6 are retained; nobody changes it."""
    root = tmp_path_factory.mktemp("whole") / "run"
    fill_store(root, range(7), snapshots=(2,))
    return root


@pytest.fixture(scope="session")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of steps 0 to 11 whose log has several closed segments; nobody changes it."""
    root = tmp_path_factory.mktemp("long") / "run"
    fill_store(root, range(12), snapshots=(3,), segment_bytes=3000)
    assert len(list((root / "wal").iterdir())) >= 3
    return root


@pytest.fixture(scope="session")
def known(whole: Path) -> Known:
    """Every commit of the store `whole`."""
    return Known.of(whole)


@pytest.fixture
def run(whole: Path, root: Path) -> Path:
    """A copy of the store `whole`, for damaging."""
    return copy_store(whole, root)
