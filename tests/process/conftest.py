"""Stores in a temporary directory."""

from __future__ import annotations

from tests.support.command_fixtures import ask
from tests.support.store_fixtures import active, medium, quick_path, root, store

__all__ = ["active", "ask", "medium", "quick_path", "root", "store"]
