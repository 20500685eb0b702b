"""Where the command of this package begins.

Owns which module it is. Invariant: imports nothing that takes long.
"""

from __future__ import annotations

from trainer.entry_cli import begin


def serve() -> None:
    """Be the command `serve`."""
    begin("serve.cli")
