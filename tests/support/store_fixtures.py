"""Fixtures of tests that work on a store: where it lies, on which medium, and the store itself."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardb
from tests.support.stores import MEDIA, Medium

MEMORY = Path("/dev/shm")


@pytest.fixture
def root() -> Iterator[Path]:
    """Where the store of a test goes: in memory if possible, because every commit syncs."""
    place = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="shardb-test-", dir=place) as folder:
        yield Path(folder) / "run"


@pytest.fixture
def active() -> Iterator[Path]:
    """Where an active store goes: on a RAM disk."""
    if not MEMORY.is_dir():
        pytest.skip(f"no RAM disk at {MEMORY}")
    with tempfile.TemporaryDirectory(prefix="shardb-test-", dir=MEMORY) as folder:
        yield Path(folder) / "run"


@pytest.fixture(params=MEDIA)
def medium(request: pytest.FixtureRequest) -> Medium:
    """Files of a disk, and of a RAM disk, where objects are mapped."""
    return Medium(request.param)


@pytest.fixture
def store(root: Path, medium: Medium) -> Iterator[shardb.Store]:
    """An empty, open store, on either medium."""
    with shardb.open(root, create=True, files=medium) as opened:
        yield opened


@pytest.fixture
def quick_path(root: Path) -> Path:
    """A directory for the stores of a test that has several; in memory if possible."""
    return root.parent
