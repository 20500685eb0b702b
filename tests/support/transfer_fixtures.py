"""Fixtures of tests that copy from one store to another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import shardb
from tests.support.transfer_stores import commit


@pytest.fixture
def source(quick_path: Path) -> Iterator[shardb.Store]:
    """A store with steps 0 to 3."""
    with shardb.open(quick_path / "source", create=True) as store:
        for step in range(4):
            commit(store, step)
        yield store


@pytest.fixture
def target(quick_path: Path) -> Iterator[shardb.Store]:
    """An empty store."""
    with shardb.open(quick_path / "target", create=True) as store:
        yield store
