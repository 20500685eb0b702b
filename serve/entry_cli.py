"""Where the command of this package begins.

Owns which module it is. Invariant: imports nothing that takes long.
"""

from __future__ import annotations

from trainer.entry_cli import begin

# What a command is, and where.
MODULES = {
    "serve": "serve.cli",
}


def serve() -> None:
    """Be the command `serve`."""
    begin(MODULES["serve"])
