"""The command `model-doctor`: what is wrong with a package, whoever made it.

Owns the command line and what is printed.
"""

from __future__ import annotations

import json as json_text
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainer.command_cli import run_command
from trainer.sizes import in_bytes

if TYPE_CHECKING:
    from export.doctor_findings import Examined

HELP = """Say what is wrong with a Hugging Face package or a GGUF file, whoever made it.

\b
Examples:
  model-doctor package
  model-doctor model.gguf
  model-doctor package --against run@step-600
  model-doctor package --json
  model-doctor adapter        what `export-hf --adapter` wrote

It looks at index and headers, names and shapes, the tie flag, doubled settings, the tokenizer and
its special ids, file modes and leftovers, and counts NaN and infinite values. Nothing is changed,
no code of the package is run, and memory stays small whatever the size. --against also computes
logits over up to 128 positions and compares them with a store's: nothing else finds weights in a
wrong order, such as another rotary layout. Exit code 1 where there is an error or a warning, notes
alone are 0; 3 where it is no package at all. An interrupt leaves everything as it was.
"""


def main() -> None:
    """Run the command and exit."""
    run_command(command, HELP, "model-doctor")


def command(
    package: Annotated[Path, typer.Argument(metavar="DIR|FILE", help="A folder or a GGUF file.")],
    against: Annotated[
        str | None, typer.Option(metavar="STORE[@REF]", help="The store that it should be of.")
    ] = None,
    allow_network: Annotated[bool, typer.Option(help="Read from a network file system.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> int:
    """Look, and say what was found."""
    # torch takes seconds, and help should not.
    from rich.console import Console

    from export.doctor_run import Against, examine

    chosen = None
    if against is not None:
        store, ref = split_ref(against)
        chosen = Against(store=store, ref=ref, allow_network=allow_network)
    console = Console(stderr=True)
    with console.status("reading every value") if console.is_terminal else nullcontext():
        examined = examine(package, chosen)
    print(json_text.dumps(examined.to_json()) if json else _text(examined))
    return examined.exit_code


def split_ref(text: str) -> tuple[str, str | None]:
    """Part STORE@REF; a store whose path has an @ may be named without a ref."""
    store, at, ref = text.rpartition("@")
    if not at or Path(text).exists():
        return text, None
    return store, ref


def _text(examined: Examined) -> str:
    size, looked = in_bytes(examined.weight_bytes), f"{examined.values_read:,} values"
    lines = [f"{examined.path}: {examined.tensors:,} tensors, {size}; {looked} were looked at"]
    if examined.against is not None:
        lines.append(f"  against the store: {examined.against}")
    for finding in examined.findings:
        place = " ".join(filter(None, (finding.file, finding.field)))
        remedy = f": {finding.remedy}" if finding.remedy else ""
        lines.append(f"{finding.severity}: {place + ': ' if place else ''}{finding.what}{remedy}")
    counts = examined.to_json()["counts"]
    told = [f"{n} {grade}{'s' if n != 1 else ''}" for grade, n in counts.items() if n]
    return "\n".join([*lines, ", ".join(told) or "no findings"])


if __name__ == "__main__":
    main()
