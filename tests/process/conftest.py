"""Stores in a temporary directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import shardb


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the store of a test goes."""
    return tmp_path / "run"


@pytest.fixture
def store(root: Path) -> Iterator[shardb.Store]:
    """An empty, open store."""
    with shardb.open(root, create=True) as opened:
        yield opened
