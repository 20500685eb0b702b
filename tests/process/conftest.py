"""Stores in a temporary directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import shardb
from tests.support.stores import MEDIA, Medium


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the store of a test goes."""
    return tmp_path / "run"


@pytest.fixture(params=MEDIA)
def medium(request: pytest.FixtureRequest) -> Medium:
    """Files of a disk, and of a RAM disk, where objects are mapped."""
    return Medium(request.param)


@pytest.fixture
def store(root: Path, medium: Medium) -> Iterator[shardb.Store]:
    """An empty, open store, on either medium."""
    with shardb.open(root, create=True, files=medium) as opened:
        yield opened
