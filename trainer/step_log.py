"""The step log `logs/steps.jsonl`: one JSON object a committed step, for people and plots.

Owns the file and the shape of its lines. Knows nothing of training. It is a convenience copy of
what the commits hold: a line is written only after its commit returned, lines beyond the step that
a run resumes at are cut, and lines that a crash kept from being written are made again from the
commits. Invariant: after `open_step_log` the steps of the lines increase and none is beyond the
resumed step. It is not synced: power loss may leave a gap, which the next start fills.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from shardb.state import DEFAULT_BRANCH
from trainer.errors import InputError

FILE_NAME = "steps.jsonl"
LOG_FOLDER = "logs"


class StepLog:
    """The open step log of a running trainer."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line and hand it to the operating system, whole."""
        # One unbuffered write a line: a reader that follows the file never sees half of one
        # unless the process dies inside the call, and then the next start cuts it.
        self._file.write(encode_line(line))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def log_folder(store: Path, branch: str) -> Path:
    """Give the folder of a branch's step log: `logs`, or one of its own below it."""
    folder = store / LOG_FOLDER
    return folder if branch == DEFAULT_BRANCH else folder / "branches" / branch


def open_step_log(
    folder: Path, resumed_step: int, missing_lines: Callable[[int], Iterable[Mapping[str, Any]]]
) -> StepLog:
    """Open the log at `resumed_step`: cut what lies beyond it, add what is missing before it.

    `missing_lines(last)` gives the lines of the committed steps after `last`, in order, up to
    `resumed_step`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise InputError(
            f"{error.filename}: a file, or a link that leads nowhere, lies where the folder of the "
            "step log is: bring back what it leads to, or move it away; the lines of the steps are "
            "made again from the store"
        ) from error
    path = folder / FILE_NAME
    check_is_file(path)
    make_own(path)
    last_step = cut(path, resumed_step)
    log = StepLog(open(path, "ab", buffering=0))  # noqa: SIM115 - closed by the run
    for line in missing_lines(last_step):
        log.append(line)
    return log


def make_own(path: Path) -> None:
    """Give a run a step log of its own in the place of one that a hard-linked copy has too."""
    if not path.exists() or path.stat().st_nlink == 1:
        return
    copy = path.with_name(f"{path.name}.partial")
    shutil.copyfile(path, copy)
    copy.replace(path)


def cut(path: Path, resumed_step: int) -> int:
    """Cut the file before its first line that is torn, out of order or beyond `resumed_step`.

    Gives the step of the last line that stays, 0 when none does.
    """
    if not path.exists():
        return 0
    last_step, kept_bytes = 0, 0
    with open(path, "rb") as file:
        for line in file:
            step = _step_of(line)
            if step is None or not last_step < step <= resumed_step:
                break
            last_step = step
            kept_bytes += len(line)
    if kept_bytes < path.stat().st_size:
        os.truncate(path, kept_bytes)
    return last_step


def last_logged_step(folder: Path) -> int:
    """Give the highest step that the log of a folder names, 0 without a log."""
    return _highest(folder, "step")


def last_durable_step(folder: Path) -> int:
    """Give the highest step that the log of a folder calls durable, 0 without a log."""
    return _highest(folder, "durable_step")


def check_is_file(path: Path) -> None:
    """Refuse what is no file in the place of a step log."""
    if path.is_symlink() and not path.exists():
        what = "this is a link that leads nowhere: bring back what it leads to, or remove it"
    elif path.is_dir():
        what = "a directory lies where the step log is: move it away"
    else:
        return
    raise InputError(f"{path}: {what}; the lines of the steps are made again from the store")


def encode_line(line: Mapping[str, Any]) -> bytes:
    """Give one line of JSON; a number that is not finite becomes null: JSON has no word for it."""
    return json.dumps(_finite(line), allow_nan=False).encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return value


def _step_of(line: bytes) -> int | None:
    """Read the step of a whole line; None when the line is torn or no step line."""
    return _number_of(line, "step")


def _highest(folder: Path, key: str) -> int:
    path = folder / FILE_NAME
    check_is_file(path)
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        return max((_number_of(line, key) or 0 for line in file), default=0)


def _number_of(line: bytes, key: str) -> int | None:
    if not line.endswith(b"\n"):
        return None
    try:
        values = json.loads(line)
    except ValueError:
        return None
    step = values.get(key) if isinstance(values, dict) else None
    return step if isinstance(step, int) and step > 0 else None
