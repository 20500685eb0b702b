"""The command `import-hf`: a Hugging Face package into a store.

Owns the command line and the screen. Knows nothing of packages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from shardb.errors import UsageError
from trainer.command_cli import run_command

DTYPES = ("fp32", "bf16", "fp16")
STAGES = ("auto", "native", "transformers")
HELP = """Import a Hugging Face package into a store.

\b
Examples:
  import-hf ./SmolLM2-135M --store smol
  import-hf ./SmolLM2-135M-Instruct --store smol --branch instruct
  train --store smol --data-dir rows --learning-rate 1e-4 --max-steps 100

DIR holds config.json and safetensors weights, single or split. Everything is checked before
anything is written; tensors are streamed, so memory holds one shard. The import is one commit at
step 0, pinned as a snapshot; the weights keep their form and bytes. A model that the store holds
already is stored once. An interrupt leaves the store as it was: run the command again.
"""


def main() -> None:
    """Run the command and exit."""
    run_command(command, HELP, "import-hf")


def command(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The package's folder.")],
    store: Annotated[str, typer.Option(help="The store; made when there is none.")],
    branch: Annotated[str, typer.Option(help="The branch that the import begins.")] = "main",
    dtype: Annotated[
        str | None, typer.Option(help="Convert to fp32, bf16 or fp16; as it is if not given.")
    ] = None,
    stages: Annotated[
        str, typer.Option(help="auto, native, or transformers: its layers compute the blocks.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON report.")] = False,
    allow_network: Annotated[bool, typer.Option(help="Write to a network file system.")] = False,
) -> int:
    """Import, and say what to do next."""
    for flag, value, choices in (("dtype", dtype, DTYPES), ("stages", stages, STAGES)):
        if value is not None and value not in choices:
            raise UsageError(f"--{flag} is {value!r}: choose from {', '.join(choices)}")
    # torch takes seconds, and help should not.
    from export.import_run import plan_import, report_json, run_import

    plan = plan_import(Path(directory), dtype=dtype, stages=stages)
    with _bar(hidden=as_json) as progress:
        made = run_import(
            plan, Path(store), branch=branch, allow_network=allow_network, progress=progress
        )
    if as_json:
        print(report_json(plan, made, Path(store)))
        return 0
    for note in (*plan.notes, *made.notes):
        print(f"note: {note}")
    again = "" if branch == "main" else f" --branch {branch}"
    print(
        f"{store}: {plan.source.model_type} with {plan.parameter_count:,} parameters in"
        f" {len(plan.places)} tensors, {made.stored_bytes:,} bytes; commit {made.commit.id},"
        f" pinned as {made.snapshot}\nnext: train --store {store}{again} --data-dir ROWS, or"
        f" train-generate --store {store} --ref {branch} --prompt TEXT"
    )
    return 0


@contextmanager
def _bar(*, hidden: bool) -> Iterator[Callable[[int, int], None]]:
    """Show how far it is, on a screen that a person sees."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("importing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    shown = console.is_terminal and not hidden
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("importing", total=None)
        yield lambda done, whole: bar.update(task, completed=done, total=whole)


if __name__ == "__main__":
    main()
