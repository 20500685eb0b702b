"""Stores to fail in: made once, laid out anew for every fault."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardb.testing.bases import Base, make_base
from shardb.testing.model import Journal
from shardb.testing.recording import RecordingFileSystem
from shardb.testing.verbs import small_base
from shardb.testing.workloads import Script
from tests.support.ram_disk import scratch_directory


@pytest.fixture
def scratch() -> Iterator[str]:
    """Give an empty directory for simulated disks, and remove it."""
    with scratch_directory() as path:
        yield path


@pytest.fixture(scope="session")
def template() -> Base:
    """Give a closed store with three commits and a snapshot."""

    def fill(files: RecordingFileSystem, path: str, journal: Journal) -> Script:
        script = Script(files, path, journal)
        script.commit(0)
        script.commit(1)
        script.snapshot("step-1")
        script.commit(2)
        return script

    with scratch_directory() as path:
        return make_base(path, fill)


@pytest.fixture(scope="session")
def scene_base() -> Base:
    """Give a closed store on which every verb has something to do."""
    with scratch_directory() as path:
        return small_base(path)
