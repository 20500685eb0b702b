"""The command `shardb` in this process."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def nothing_around(alone: None) -> None:
    """Every test of this folder finds only what it names."""
