"""The command `train`: parses flags and hands them to `trainer.start`.

Owns the command line, made from the table in `recipe_flags`, and its help. Knows nothing of
training. torch is imported only once the flags are parsed, so that help and mistyped flags answer
at once.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import partial
from typing import Any, Optional

import typer

from trainer.command_cli import answer, fail, let_waiting_threads_sleep, new_app
from trainer.host_memory import keep_freed_memory
from trainer.recipe import Recipe, Settings
from trainer.recipe_flags import FLAGS, Flag, Scope
from trainer.signals import StopRequest, stop_requests

HELP = """Train a language model whose weights and optimizer state live in a store.

Every step is one atomic, durable commit. The first call begins a run, the same call later goes on
with it, and `train --store RUN` alone resumes it with its stored recipe.

\b
Examples:
  train --store run --preset demo --data-dir data/train --val-data-dir data/val \\
        --max-steps 200 --seed 7
  train --store run                       go on where it stopped
  train --store run --max-steps 400       go on for longer: the result is that of one long run
  train --store run --learning-rate 1e-4  go on with a change, which is printed and recorded
  train --store run --branch retry --from step-200 --learning-rate 1e-4   another way from there
  train --store run --active /dev/shm/run --durable-every 50   steps in memory, some of them kept
  train --store run --preset demo --data-dir data/train --dry-run   sizes only, nothing is made

A dry run fails with the exit code that the run itself would, and names every budget that does not
hold.

An interrupt (SIGINT, SIGTERM) lets the step in work finish and commit. A second SIGINT, SIGKILL or
a power cut leaves the store at its last commit: start again with the same command. At most the
step in work is lost, and the result is the same, bit for bit, as that of a run never stopped.
With --active an interrupt publishes the last step too; a power cut goes back to the newest
published one.

RUN/logs/steps.jsonl has one JSON object a step, written after the step's commit. So has standard
output one line a step, unless it is a terminal; everything else is said on standard error.
"""


def main() -> None:
    """Run the command and exit."""
    let_waiting_threads_sleep()
    keep_freed_memory()
    with stop_requests() as request:
        sys.exit(run(sys.argv[1:], request))


def run(arguments: list[str], request: StopRequest) -> int:
    """Do what the arguments say, until the end or a stop request; give the exit code."""
    return answer(new_app(_command(request), HELP), arguments, "train")


def _command(request: StopRequest) -> Callable[..., int]:
    """Give the command as typer reads it: one keyword parameter a flag, none of them required."""

    def command(**flags: Any) -> int:
        given = {name: value for name, value in flags.items() if value is not None}
        if not given.keys() & {"store", "run_dir"}:
            return fail("--store is needed: where the run lives (see `train --help`)", 2)
        from trainer.start import train

        return train(given, request, partial(print, flush=True))

    parameters = [
        inspect.Parameter(
            flag.field,
            inspect.Parameter.KEYWORD_ONLY,
            default=_option(flag),
            annotation=Optional[flag.kind],  # noqa: UP045 - built at run time
        )
        for flag in FLAGS
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _option(flag: Flag) -> Any:
    default = _DEFAULTS.get(flag.field) if flag.scope in (Scope.TRAINING, Scope.SETTING) else None
    shown = default if not isinstance(default, bool) else ("on" if default else "off")
    return typer.Option(
        None,
        *flag.names,
        help=flag.help if shown is None else f"{flag.help} Default: {shown}.",
        rich_help_panel=str(flag.scope),
        show_default=False,
    )


_DEFAULTS = {
    field.name: field.default
    for record in (Recipe, Settings)
    for field in fields(record)
    if field.default is not MISSING
}


if __name__ == "__main__":
    main()
