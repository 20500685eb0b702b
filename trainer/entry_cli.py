"""Where the commands of the trainer and of the store begin, and how every command does.

Owns the moment before a command can tell anything: what it needs takes Python a while to import,
and a signal is to end it well meanwhile. Knows nothing of what commands do. Invariant: imports
nothing that takes long before signals are received.
"""

from __future__ import annotations

import sys
from importlib import import_module

from trainer.ending_signals import INTERRUPTED, ending_signals

# What a command is, and where.
MODULES = {
    "shardb": "shardb.cli",
    "train": "trainer.cli",
    "train-data": "trainer.data_cli",
    "train-generate": "trainer.generate_cli",
    "train-report": "trainer.report_cli",
}


def begin(module: str) -> None:
    """Import a command and be it; an interrupt is one line and 130, whenever it comes."""
    try:
        with ending_signals():
            command = import_module(module)
        command.main()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr, flush=True)
        sys.exit(INTERRUPTED)


def shardb() -> None:
    """Be the command `shardb`."""
    begin(MODULES["shardb"])


def train() -> None:
    """Be the command `train`."""
    begin(MODULES["train"])


def train_data() -> None:
    """Be the command `train-data`."""
    begin(MODULES["train-data"])


def train_generate() -> None:
    """Be the command `train-generate`."""
    begin(MODULES["train-generate"])


def train_report() -> None:
    """Be the command `train-report`."""
    begin(MODULES["train-report"])
