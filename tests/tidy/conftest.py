"""The tree as the tidy tests see it."""

from __future__ import annotations

import pytest

from tests.tidy.source import project_files


@pytest.fixture(scope="session")
def repository_paths() -> set[str]:
    """Give every path of the project, relative to its root."""
    return set(project_files())
