"""A store to fail in: made once, laid out anew for every fault."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fault.faulted import Template, make_template
from tests.support.ram_disk import scratch_directory


@pytest.fixture
def scratch() -> Iterator[str]:
    """Give an empty directory for simulated disks, and remove it."""
    with scratch_directory() as path:
        yield path


@pytest.fixture(scope="session")
def template() -> Template:
    """Give a closed store with three commits and a snapshot."""
    with scratch_directory() as path:
        return make_template(path)
