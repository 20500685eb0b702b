"""The command `train-report`: a run's history as one HTML page, or as JSON.

Owns the command line and the file that is written. It reads the log, opens no store and takes no
lock for longer than reading the newest segment takes, so it works beside a live run.
"""

from __future__ import annotations

import json as json_text
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from shardb.state import DEFAULT_BRANCH
from trainer.command_cli import answer, new_app
from trainer.errors import InputError
from trainer.report_html import page
from trainer.report_html_data import report_data

HELP = """Write one HTML page about a training run: losses, norms, times, memory, what happened.

\b
Examples:
  train-report run                         writes train-report.html
  train-report run --out /tmp/run.html --branch retry
  train-report run --json                  the same data for scripts, on standard output

The page holds its data and its script and asks no host for anything. It is written beside its name
and put in place whole; an interrupt leaves nothing behind. Nothing in the store is changed.
"""


def main() -> None:
    """Run the command and exit."""
    sys.exit(answer(new_app(command, HELP), sys.argv[1:], "train-report"))


def command(
    store: Annotated[str, typer.Argument(help="The run's store.")],
    out: Annotated[str, typer.Option(help="File to write.")] = "train-report.html",
    branch: Annotated[str, typer.Option(help="Branch to show.")] = DEFAULT_BRANCH,
    json: Annotated[bool, typer.Option("--json", help="Print the data, write no file.")] = False,
) -> int:
    """Read the log and write the page."""
    data = report_data(Path(store), branch)
    if json:
        print(json_text.dumps(data))
        return 0
    target = Path(out)
    if target.is_dir():
        raise InputError(f"--out {out}: this is a folder; give the name of a file in it")
    if not target.parent.is_dir():
        raise InputError(f"--out {out}: {target.parent} is no folder; make it, or name another")
    draft = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        draft.write_text(page(data), encoding="utf-8")
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    print(f"{target}: {data['step_count']:,} steps of branch {branch}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    main()
