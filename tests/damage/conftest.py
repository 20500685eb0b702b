"""The store that is damaged, made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.damage_store import Specimen, make_specimen
from tests.support.ram_disk import scratch_directory


@pytest.fixture(scope="session")
def specimen() -> Iterator[Specimen]:
    """Give a store with a file of every kind."""
    with scratch_directory() as path:
        yield make_specimen(Path(path) / "whole")


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Give an empty directory for damaged copies."""
    with scratch_directory() as path:
        yield Path(path)
