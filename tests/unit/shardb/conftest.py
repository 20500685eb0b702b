"""Stores in a temporary directory."""

from __future__ import annotations

from tests.support.store_fixtures import medium, quick_path, root, store

__all__ = ["medium", "quick_path", "root", "store"]
