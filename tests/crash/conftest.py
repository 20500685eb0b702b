"""Where simulated disks lie, and how far the suite explores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardb.testing.explorer import ExploreLimits
from shardb.testing.images import ImageLimits
from tests.support.ram_disk import scratch_directory


@pytest.fixture
def scratch() -> Iterator[str]:
    """Give an empty directory for simulated disks, and remove it."""
    with scratch_directory() as path:
        yield path


@pytest.fixture
def suite_limits() -> ExploreLimits:
    """Give the slice of the exploration that the suite can afford; `make crash` does the rest."""
    return ExploreLimits(
        images=ImageLimits(
            exhaustive_operations=2, random_subsets=2, single_operations=2, torn_writes=3
        ),
        recovery_every=1500,
        kill_every=9,
        go_on_every=16,
        audit_every=4,
        violations=5,
    )
