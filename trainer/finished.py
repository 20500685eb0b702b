"""The step log of a run that has all its steps: a kill may have come before its last line.

Owns nothing but the making up of that line, which a run that goes on makes up by itself.
Invariant: the log of a run that somebody trains is left to who trains it.
"""

from __future__ import annotations

from pathlib import Path

import shardb
from shardb.errors import ConflictError, StorageFailedError, StorageFullError
from trainer.run_shards import lines_since
from trainer.step_log import last_logged_step, log_folder, open_step_log
from trainer.tiers import durable_step_of

__all__ = ["complete_step_log"]


def complete_step_log(path: Path, branch: str, last_step: int, *, allow_network: bool) -> None:
    """Write the lines up to `last_step` that the log of a branch lacks, unless somebody trains it.

    A store or a log that cannot be written to stays as it is: a run that ended is no less whole.
    """
    folder = log_folder(path, branch)
    if last_logged_step(folder) >= last_step:
        return
    try:
        with (
            shardb.open(path, allow_network=allow_network) as store,
            store.begin(branch),  # no other process can be the writer meanwhile
        ):
            head = store.branches()[branch]
            durable_step = durable_step_of(store, branch)
            open_step_log(
                folder,
                head.step,
                lambda last: lines_since(store, head, last, durable_step=durable_step),
            ).close()
    except (ConflictError, StorageFailedError, StorageFullError, OSError):
        return
