"""How an optional library is installed: the one sentence that every message about one ends with.

Owns those words. Knows nothing of the libraries. The project is installed from its folder, and is
in no index that a plain name would be looked up in.
"""

from __future__ import annotations


def install(extra: str) -> str:
    """Give the command that installs an extra of pyproject.toml, and where to type it."""
    return f"pip install -c constraints.txt -e '.[{extra}]' (in this project's folder)"
