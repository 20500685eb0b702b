"""What every test shares: where real corpora are, and a machine kept quiet."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest

# Two cores are the reference machine; a test that lets every library start a thread a core is
# slower there, and its timing means nothing.
os.environ.setdefault("OMP_NUM_THREADS", "2")
# Threads that wait for each other by spinning are up to twenty times slower on a shared machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A suite that a shell began in the background inherits an ignored SIGINT, and so would every
# process that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_collection_finish() -> None:
    """Let the collector pass over the modules and tests, which all stay to the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def repository() -> Path:
    """Give the root of the working tree."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Give the folder of real corpora, or skip: they are too large to travel with the sources."""
    folder = Path(os.environ.get("SHARDB_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no corpora at {folder}: set SHARDB_DATA to a folder that holds corpora/")
    return folder
