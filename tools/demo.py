"""`make demo`: train real text through the store, kill it, go on, snapshot, export, read it back.

Reads from top to bottom like the story it tells. Owns the order of the commands; each is run as a
user would type it, and shown. Safe to interrupt at any point: the next `make demo` goes on from
where it stopped. It writes to `demo-run/` and, for the downloaded text, the user's cache; it never
deletes what it did not make.

Exit codes: 0 done; 2 bad input, or a folder it may not touch; 130 interrupted; else that of the
command that failed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.demo_terms import DemoError, Folder, Plan, planned
from tools.demo_text import own_text, plays
from tools.demo_train import read_steps, watch

DEFAULT_TEXT = "Shakespeare's plays"
SEED = "7"
SPEED_STEPS = 12
VALIDATIONS = 8
BARS = "▁▂▃▄▅▆▇█"


def main() -> int:
    """Parse the arguments, tell the story, and turn its errors into an exit code."""
    arguments = _arguments()
    folder = Folder(root=Path(os.path.relpath(arguments.folder)))
    try:
        if arguments.clean:
            return _clean(folder)
        _demo(folder, arguments.text or os.environ.get("TEXT", ""), quick=arguments.quick)
    except DemoError as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\ndemo: interrupted; nothing is lost, `make demo` goes on", file=sys.stderr)
        return 130
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--text", help="train on this file instead (also: the TEXT variable)")
    parser.add_argument("--folder", default="demo-run", help="where everything is put")
    parser.add_argument("--quick", action="store_true", help="a tiny model, for tests")
    parser.add_argument("--clean", action="store_true", help="delete what the demo made, and stop")
    return parser.parse_args()


def _clean(folder: Folder) -> int:
    left = folder.clean()
    if left:
        print(f"kept in {folder.root}/, not made by the demo: {', '.join(left)}")
    return 0


def _demo(folder: Folder, text: str, *, quick: bool) -> None:
    started = time.monotonic()
    named = str(own_text(text)) if text else DEFAULT_TEXT
    plan, known = folder.open(named, quick=quick)
    if known:
        print(f"{folder.root}/ is there from an earlier demo: going on with it")
    _prepare(folder, plan)
    plan = _plan_steps(folder, plan)
    plan = _train_and_kill(folder, plan)
    steps = _train_to_the_end(folder, plan)
    _heading("5 of 7  Pin the last step, then check every byte of the store")
    _run("shardb", "snapshot", str(folder.run), f"step-{plan.steps}")
    _run("shardb", "fsck", str(folder.run))
    _heading("6 of 7  Export it, so that other programs load it")
    _export(folder, plan)
    _heading("7 of 7  Write on from the snapshot")
    _generate(folder, plan)
    _tell(folder, plan, steps, time.monotonic() - started)


def _prepare(folder: Folder, plan: Plan) -> None:
    _heading("1 of 7  Text to token ids")
    if (folder.data / "manifest.json").exists():
        print(f"   {folder.data}/ is there")
        return
    text = Path(plan.text) if plan.text != DEFAULT_TEXT else plays(folder.text)
    size = plan.size
    print(f"   {plan.text}: {text.stat().st_size:,} bytes")
    _run(
        *("train-data", "prepare", "--text", str(text), "--out", str(folder.data)),
        *("--vocab-size", str(size.vocab_size), "--seq-len", str(size.seq_len)),
        *("--val-fraction", str(size.val_fraction)),
    )


def _plan_steps(folder: Folder, plan: Plan) -> Plan:
    """Measure this machine with a throw-away run, so that the demo takes three minutes anywhere."""
    if plan.steps is not None:
        return plan
    seconds = 0.0
    if plan.size.steps is None:
        _heading("2 of 7  Measure this machine")
        speed = Folder(root=folder.root / "speed")
        _run(*_train_command(speed.root, folder, plan, SPEED_STEPS, validate_every=0), quiet=True)
        measured = [line["seconds"] for line in read_steps(_step_log(speed.root))]
        seconds = sum(measured[2:]) / len(measured[2:])
    plan = folder.write_plan(planned(plan, seconds))
    if seconds:
        print(f"   {seconds:.2f} s a step: {plan.steps} steps fit about three minutes")
    return plan


def _train_and_kill(folder: Folder, plan: Plan) -> Plan:
    if plan.killed_step is not None:
        return plan
    assert plan.steps is not None
    assert plan.kill_step is not None
    _heading(f"3 of 7  Train, and kill it with SIGKILL after step {plan.kill_step}")
    every = max(1, plan.steps // VALIDATIONS)
    command = _train_command(folder.run, folder, plan, plan.steps, validate_every=every)
    seen = watch(_shown(*command), _step_log(folder.run), _log(folder), kill_step=plan.kill_step)
    if seen.exit_code == 0:
        raise DemoError("the run was over before the kill came: make demo-clean && make demo", 1)
    if not seen.killed:
        raise _failed("train", seen.exit_code)
    print(f"   SIGKILL sent inside step {seen.last_step + 1}: no handler ran, nothing was flushed")
    report = json.loads(_run("shardb", "recover", str(folder.run), "--json", quiet=True))
    step = report["opened"]["main"]["step"]
    print(f"   the store opens at step {step}; last step reported durable: {seen.last_durable}")
    if step < seen.last_durable:
        raise DemoError(f"step {seen.last_durable} was durable and is gone: please report this", 1)
    return folder.write_plan(replace(plan, killed_step=step))


def _train_to_the_end(folder: Folder, plan: Plan) -> list[Mapping[str, Any]]:
    _heading("4 of 7  Go on: the recipe is in the store")
    command = _shown("train", "--store", str(folder.run))
    seen = watch(command, _step_log(folder.run), _log(folder), kill_step=None)
    if seen.exit_code != 0:
        raise _failed("train", seen.exit_code)
    steps = read_steps(_step_log(folder.run))
    numbers = [line["step"] for line in steps]
    # More steps than planned are fine: the user went on by hand, as the last line suggests.
    if len(numbers) < (plan.steps or 0) or numbers != list(range(1, len(numbers) + 1)):
        raise DemoError("the step log has a gap or a step twice: please report this", 1)
    print(f"   steps 1 to {numbers[-1]}: each is there once")
    return steps


def _export(folder: Folder, plan: Plan) -> None:
    """Write a package; a text too short for the whole vocabulary leaves ids that stand for none."""
    known = json.loads((folder.data / "manifest.json").read_text())["vocab_size"]
    padded = ["--allow-padded-vocabulary"] if known < plan.size.vocab_size else []
    _run(
        *("export-hf", str(folder.run), "--ref", f"step-{plan.steps}"),
        *("--out", str(folder.package), "--overwrite", *padded),
    )


def _generate(folder: Folder, plan: Plan) -> None:
    size = plan.size
    _run(
        *("train-generate", "--store", str(folder.run), "--ref", f"step-{plan.steps}"),
        *("--prompt", size.prompt, "--max-new-tokens", str(size.sample_tokens), "--seed", SEED),
        *("--temperature", "0.6", "--top-k", "20"),
    )


def _tell(folder: Folder, plan: Plan, steps: list[Mapping[str, Any]], seconds: float) -> None:
    """End with what happened, in numbers read from the run, and what to type next."""
    numbers = [line["step"] for line in steps]
    held_out = [line["validation_loss"] for line in steps if "validation_loss" in line]
    manifest = json.loads((folder.data / "manifest.json").read_text())
    by_frequency = manifest["val"]["unigram_entropy_nats"]
    _heading(f"Done in {seconds:.0f} s: what just happened")
    print(f"   loss  {_curve([line['loss'] for line in steps])}")
    learned = f"loss {steps[0]['loss']:.2f} at first, {held_out[-1]:.2f} held out at last"
    more = f"shardb log {folder.run}, train --store {folder.run} --max-steps {2 * numbers[-1]}"
    activate = os.path.relpath(Path(sys.executable).parent / "activate")
    for line in (
        f"A model learned {plan.text}: {learned}; token counts give {by_frequency:.2f}.",
        f"Each of its {numbers[-1]} steps was one atomic commit: all weights, all optimizer state.",
        f"SIGKILL hit it after step {plan.killed_step}; it went on, no step lost or done twice.",
        f"Step {numbers[-1]} is pinned as a snapshot; fsck read every byte and found no fault.",
        f"{folder.package}/ is the same model for other programs: a fresh process proved it.",
        f"Next: . {activate}, then: {more}; or: make demo-clean.",
    ):
        print(f" - {line}")


def _train_command(
    store: Path, folder: Folder, plan: Plan, steps: int, *, validate_every: int
) -> list[str]:
    size = plan.size
    tokens = steps * size.batch_rows * size.seq_len
    return [
        *("train", "--store", str(store), *size.model_flags, "--device", "cpu", "--seed", SEED),
        *("--data-dir", str(folder.data / "train"), "--val-data-dir", str(folder.data / "val")),
        *("--micro-batch-size", str(size.batch_rows), "--max-steps", str(steps)),
        *("--learning-rate", str(size.learning_rate), "--lr-schedule", "cosine"),
        *("--warmup-tokens", str(tokens // 20), "--decay-tokens", str(tokens - tokens // 20)),
        *("--min-lr-ratio", "0.1", "--max-grad-norm", "1.0", "--grad-clip-mode", "global"),
        *("--validate-every", str(validate_every), "--max-validation-batches", "16"),
    ]


def _step_log(store: Path) -> Path:
    return store / "logs" / "steps.jsonl"


def _log(folder: Folder) -> Path:
    return folder.root / "train.log"


def _shown(*command: str) -> list[str]:
    """Print a command as a user would type it; give it with the path of this environment."""
    print(f"   $ {shlex.join(command)}", flush=True)
    program = Path(sys.executable).parent / command[0]
    return [str(program) if program.exists() else command[0], *command[1:]]


def _run(*command: str, quiet: bool = False) -> str:
    """Show and run a command; its output is passed through, or given back when `quiet`."""
    full = _shown(*command)
    try:
        answer = subprocess.run(full, stdout=subprocess.PIPE if quiet else None, check=False)
    except FileNotFoundError:
        raise DemoError(f"{command[0]} is not installed here: run `make demo`") from None
    if answer.returncode != 0:
        raise _failed(command[0], answer.returncode)
    return answer.stdout.decode() if quiet else ""


def _failed(program: str, exit_code: int) -> DemoError:
    if exit_code in (130, 143):
        return DemoError("interrupted; the step was committed, `make demo` goes on", exit_code)
    code = exit_code if exit_code > 0 else 1
    return DemoError(f"{program} ended with exit code {exit_code}; its message is above", code)


def _curve(values: list[float], width: int = 60) -> str:
    """Draw values as one line of bars, each the mean of its part of the run."""
    groups = [
        values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)
    ]
    means = [sum(group) / len(group) for group in groups if group]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low and math.isfinite(high) else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def _heading(text: str) -> None:
    bold, plain = ("\x1b[1m", "\x1b[0m") if sys.stdout.isatty() else ("", "")
    print(f"\n{bold}{text}{plain}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
