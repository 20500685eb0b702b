"""A note beside the step log that says in which active store each branch was last trained.

Owns the file `logs/active.json`. The settings of a commit name the active store too, but only once
that commit is published: a run that is killed before is found again by this note. Knows nothing of
stores. A note that cannot be read counts as none.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from trainer.step_log import LOG_FOLDER

FILE_NAME = "active.json"


def hinted_active(store: Path, branch: str) -> str | None:
    """Give the folder of the active store that a branch was last trained in."""
    named = _read(store).get(branch)
    return named if isinstance(named, str) else None


def write_hint(store: Path, branch: str, active: str | None) -> None:
    """Note the active store of a branch, durably; None when it is trained without one."""
    notes = _read(store)
    if notes.get(branch) == active:
        return
    notes.pop(branch, None)
    if active is not None:
        notes[branch] = active
    folder = store / LOG_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{FILE_NAME}.new"
    with open(draft, "w", encoding="utf-8") as file:
        json.dump(notes, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, folder / FILE_NAME)


def _read(store: Path) -> dict[str, object]:
    try:
        notes = json.loads((store / LOG_FOLDER / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return notes if isinstance(notes, dict) else {}
