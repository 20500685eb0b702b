"""TensorBoard event files of a run: the numbers of the step log, as curves.

Owns the tags and the loading of a writer, which is an extra. Knows nothing of training. Steps that
a resumed run makes again replace the ones behind the step it resumes at.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any, Protocol

from shardb.extras import install
from trainer.errors import InputError

_WRITERS = ("torch.utils.tensorboard", "tensorboardX")
_GROUPS = {
    "loss": "train",
    "learning_rate": "train",
    "grad_norm": "train",
    "clip_scale": "train",
    "validation_loss": "validation",
    "best_validation_loss": "validation",
}


class SummaryWriter(Protocol):
    """The part of a TensorBoard writer that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Add one point to a curve."""

    def close(self) -> None:
        """Write what is left and close the file."""


class ScalarWriter:
    """Writes the numbers of each line of the step log."""

    def __init__(self, writer: SummaryWriter) -> None:
        self._writer = writer

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a point to each curve of a step."""
        for tag, value in scalars(line).items():
            self._writer.add_scalar(tag, value, line["step"])

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def open_scalars(folder: str, resumed_step: int) -> ScalarWriter:
    """Open a folder's event file; InputError where no writer is installed."""
    return ScalarWriter(writer_class()(folder, purge_step=resumed_step + 1))


def check_folder(folder: str) -> None:
    """Refuse what cannot be a folder of event files, and a machine without a writer of them."""
    writer_class()
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise InputError(f"--tensorboard {folder}: exists and is no folder: give another")


def writer_class() -> Any:
    """Give the first writer that can be loaded; InputError names what to install."""
    for module in _WRITERS:
        try:
            return importlib.import_module(module).SummaryWriter
        except ImportError:
            continue
    raise InputError(
        f"--tensorboard needs a writer that is not installed: {install('tensorboard')}, or"
        " leave the flag out (logs/steps.jsonl has the same numbers)"
    )


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """Give tag and value of every number of a line."""
    found: dict[str, Any] = {}
    for name, value in line.items():
        if name == "step":
            continue
        if isinstance(value, Mapping):
            found |= {f"{name}/{key}": v for key, v in value.items() if _is_number(v)}
        elif _is_number(value):
            found[f"{_GROUPS.get(name, 'run')}/{name}"] = value
    return {tag: float(value) for tag, value in found.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
