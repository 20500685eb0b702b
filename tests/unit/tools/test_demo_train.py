"""Does the demo see each committed step once, and kill where it says?"""

from __future__ import annotations

import sys
from pathlib import Path

from tools.demo_train import read_steps, watch

# Stands for the trainer: one line a step into the step log, as slow as told.
TRAINER = """
import json, sys, time
log, first, last, seconds, code = sys.argv[1:]
with open(log, "a", buffering=1) as out:
    for step in range(int(first), int(last) + 1):
        time.sleep(float(seconds))
        line = {"step": step, "durable_step": step, "loss": 1 / step, "seconds": float(seconds),
                "tokens_per_second": 10.0}
        out.write(json.dumps(line) + "\\n")
sys.exit(int(code))
"""


def command(log: Path, first: int, last: int, *, seconds: float = 0.01, code: int = 0) -> list[str]:
    words = [str(log), str(first), str(last), str(seconds), str(code)]
    return [sys.executable, "-c", TRAINER, *words]


def test_is_every_step_seen_and_the_exit_code_kept(tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    seen = watch(command(log, 1, 5, code=6), log, tmp_path / "out", kill_step=None)
    assert (seen.exit_code, seen.last_step, seen.last_durable, seen.killed) == (6, 5, 5, False)


def test_does_the_kill_land_after_its_step(tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    seen = watch(command(log, 1, 500, seconds=0.05), log, tmp_path / "out", kill_step=4)
    assert seen.killed
    assert 4 <= seen.last_step <= read_steps(log)[-1]["step"] < 500


def test_is_a_trainer_that_ends_too_early_not_called_killed(tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    seen = watch(command(log, 1, 3, code=3), log, tmp_path / "out", kill_step=100)
    assert (seen.killed, seen.exit_code) == (False, 3)


def test_are_the_steps_of_an_earlier_run_not_seen_again(tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    watch(command(log, 1, 3), log, tmp_path / "out", kill_step=None)
    seen = watch(command(log, 4, 4), log, tmp_path / "out", kill_step=3)
    assert seen.last_step == 4
    assert [line["step"] for line in read_steps(log)] == [1, 2, 3, 4]
