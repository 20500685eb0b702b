"""Where the commands of this package begin.

Owns which module each of them is. Invariant: imports nothing that takes long.
"""

from __future__ import annotations

from trainer.entry_cli import begin


def export_gguf() -> None:
    """Be the command `export-gguf`."""
    begin("export.gguf_cli")


def export_hf() -> None:
    """Be the command `export-hf`."""
    begin("export.hf_cli")


def import_hf() -> None:
    """Be the command `import-hf`."""
    begin("export.import_cli")


def model_doctor() -> None:
    """Be the command `model-doctor`."""
    begin("export.doctor_cli")
