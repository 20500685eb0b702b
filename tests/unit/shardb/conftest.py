"""Stores in a temporary directory, and two with a known history that are only ever copied."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command_fixtures import alone, ask
from tests.support.damage import Known
from tests.support.small_stores import copy_store, fill_store
from tests.support.store_fixtures import medium, quick_path, root, store
from tests.support.transfer_fixtures import source, target

__all__ = [
    "alone",
    "ask",
    "known",
    "long",
    "medium",
    "nobody",
    "quick_path",
    "root",
    "run",
    "source",
    "store",
    "target",
    "whole",
]


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


@pytest.fixture
def nobody(run: Path) -> Iterator[None]:
    """Be a user who owns the store, and may not read everything."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    for path in [run, *run.rglob("*")]:
        os.chown(path, 65534, 65534)
    for directory in [*run.parents][:-1]:
        directory.chmod(directory.stat().st_mode | 0o555)
    os.seteuid(65534)
    yield
    os.seteuid(0)
