"""What a run says of the active store that it was last trained in: that it is gone, or not needed.

Owns these sentences. Changes nothing. A RAM disk is empty after a restart of the machine, and what
stays on one takes memory until somebody removes it: neither goes by without a word.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from trainer.active_hint import hinted_active
from trainer.step_log import last_logged_step, log_folder

_MARK = "FORMAT"


def gone_text(store: Path, branch: str, step: int) -> str | None:
    """Say that the active store is gone, and from which durable step of the store it goes on."""
    active = hinted_active(store, branch)
    if active is None or (Path(active) / _MARK).exists():
        return None
    last = last_logged_step(log_folder(store, branch))
    again = "the step log has none behind it"
    if last > step:
        again = f"what came behind it, to step {last} in the step log, is made again"
    return (
        f"{active}: the active store is gone, as after a restart of the machine; training goes on"
        f" after step {step}, the newest durable one: {again}"
    )


def left_text(store: Path, branch: str, active: str | None, branches: Iterable[str]) -> str | None:
    """Say that the folder of an active store is left behind; `branches` are those of the store."""
    left = hinted_active(store, branch)
    if left is None or not (Path(left) / _MARK).exists():
        return None
    users = [active, *(hinted_active(store, each) for each in branches if each != branch)]
    if os.path.realpath(left) in {os.path.realpath(user) for user in users if user}:
        return None
    return (
        f"{left}: training goes on without this folder, and nothing in it is needed any more:"
        " remove it to have its memory back"
    )
