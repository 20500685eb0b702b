"""Start the trainer, follow its step log, kill it when asked.

Owns the trainer's process while the demo watches it. Knows nothing of what is trained. A step is
in the log only after its commit, so what is read here is what the store must still have later.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.02
SHOWN_LINES = 20
SHOW_CURSOR = "\x1b[?25h"


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What was seen of one run of the trainer: its exit code, and the last step it reported."""

    exit_code: int
    last_step: int
    last_durable: int
    killed: bool


def watch(command: list[str], step_log: Path, out: Path, *, kill_step: int | None) -> Watched:
    """Run the trainer; send SIGKILL somewhere inside the step after `kill_step`.

    On a terminal the trainer draws its own progress; else every N-th step is printed here.
    """
    terminal = sys.stdout.isatty()
    offset = step_log.stat().st_size if step_log.exists() else 0
    last: Mapping[str, Any] = {"step": 0, "durable_step": 0}
    killed = False
    with out.open("ab") as lines:
        trainer = subprocess.Popen(command, stdout=None if terminal else lines)
        try:
            for last in _follow(step_log, offset, trainer):
                if not terminal:
                    _show(last, kill_step)
                if kill_step is not None and last["step"] >= kill_step and not killed:
                    time.sleep(random.uniform(0.0, last["seconds"]))
                    trainer.send_signal(signal.SIGKILL)
                    killed = True
            exit_code = trainer.wait()
        except BaseException:
            _let_finish(trainer)
            raise
    if terminal and killed:
        print(SHOW_CURSOR, flush=True)
    return Watched(
        exit_code=exit_code,
        last_step=last["step"],
        last_durable=last["durable_step"],
        killed=killed and exit_code == -signal.SIGKILL,
    )


def _let_finish(trainer: subprocess.Popen[bytes]) -> None:
    """Wait for the trainer to commit its step: an interrupt on the terminal reached it as well."""
    if trainer.poll() is None:
        trainer.send_signal(signal.SIGTERM)
        trainer.wait()


def _follow(
    step_log: Path, offset: int, trainer: subprocess.Popen[bytes]
) -> Iterator[Mapping[str, Any]]:
    """Give every whole line that is appended, until the trainer has ended."""
    while True:
        ended = trainer.poll() is not None
        data = b""
        if step_log.exists():
            with step_log.open("rb") as stream:
                stream.seek(min(offset, step_log.stat().st_size))
                data = stream.read()
        whole = data[: data.rfind(b"\n") + 1]
        offset += len(whole)
        for line in whole.splitlines():
            yield json.loads(line)
        if ended:
            return
        time.sleep(POLL_SECONDS)


def _show(line: Mapping[str, Any], kill_step: int | None) -> None:
    step = line["step"]
    if step % SHOWN_LINES == 0 or step == 1 or step == kill_step or "validation_loss" in line:
        held_out = line.get("validation_loss")
        # A step with a validation takes longer, so its speed would mislead.
        told = f"{line['tokens_per_second']:,.0f} tokens/s"
        told = told if held_out is None else f"held-out loss {held_out:.3f}"
        print(f"   step {step:4d}  loss {line['loss']:.3f}  {told}", flush=True)


def read_steps(step_log: Path) -> list[Mapping[str, Any]]:
    """Read the whole step log of a run."""
    return [json.loads(line) for line in step_log.read_text().splitlines()]
