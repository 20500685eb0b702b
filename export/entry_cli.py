"""Where the commands of this package begin.

Owns which module each of them is. Invariant: imports nothing that takes long.
"""

from __future__ import annotations

from trainer.entry_cli import begin

# What a command is, and where.
MODULES = {
    "export-gguf": "export.gguf_cli",
    "export-hf": "export.hf_cli",
    "import-hf": "export.import_cli",
    "model-doctor": "export.doctor_cli",
}


def export_gguf() -> None:
    """Be the command `export-gguf`."""
    begin(MODULES["export-gguf"])


def export_hf() -> None:
    """Be the command `export-hf`."""
    begin(MODULES["export-hf"])


def import_hf() -> None:
    """Be the command `import-hf`."""
    begin(MODULES["import-hf"])


def model_doctor() -> None:
    """Be the command `model-doctor`."""
    begin(MODULES["model-doctor"])
