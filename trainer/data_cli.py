"""The command `train-data`: prepare a data set from text, and look into one.

Owns the flags, what is printed and the exit codes. The work is done by `trainer.data`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn, TypeAlias

import typer

from shardb.errors import EXIT_CODES
from trainer.command_cli import answer, fail
from trainer.data.inspect import Inspection, SplitReport, inspect
from trainer.data.manifest import SPLITS, Manifest, SplitEntry
from trainer.data.options import VAL_FRACTION, PrepareOptions
from trainer.data.packing import ROWS_PER_FILE
from trainer.data.prepare import Prepared, prepare
from trainer.data.progress import TextProgress
from trainer.data.readers import ReadRules

_SAMPLE_CHARACTERS = 600
_LIST_FLAGS = frozenset({"--text", "--val-text"})
_INTERRUPTED = {
    130: "interrupted (SIGINT); nothing half-made is left",
    143: "terminated (SIGTERM); nothing half-made is left",
}
_EXIT_CODES = "\b\nExit codes:\n" + "\n".join(
    f"  {code:>3}  {meaning}" for code, meaning in {**EXIT_CODES, **_INTERRUPTED}.items()
)
_PREPARE_EPILOG = f"""\b
Examples:
  train-data prepare --text stories.txt --out data --vocab-size 2000 --seq-len 128
  train-data prepare --text corpus/*.jsonl.zst --out data --vocab-size 32000 --seq-len 1024
  train-data prepare --text a.txt --val-text b.txt --tokenizer tokenizer.json --seq-len 512 --out d
  train-data prepare --text chats.jsonl --format chat --tokenizer model/tokenizer.json \\
        --seq-len 512 --out d     only what the assistant says is learned

{_EXIT_CODES}"""
_INSPECT_EPILOG = f"""\b
Examples:
  train-data inspect data
  train-data inspect data/train --sample 3
  train-data inspect data --verify --json

{_EXIT_CODES}"""

_EPILOG = f"""\b
Examples:
  train-data prepare --text stories.txt --out data --vocab-size 2000 --seq-len 128
  train-data inspect data
  train-data prepare --help       every flag

{_EXIT_CODES}"""

app = typer.Typer(
    name="train-data",
    help="Make token rows for training out of text, and look into them.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class _Stopped(BaseException):
    """SIGINT or SIGTERM arrived: unwind, so that what is half-made is removed."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


_Pack: TypeAlias = Annotated[
    bool, typer.Option("--pack", help="Put several whole records into a row.")
]
_AttendAcross: TypeAlias = Annotated[
    bool, typer.Option("--attend-across", help="Let packed records see those before them.")
]


@app.command("prepare", epilog=_PREPARE_EPILOG)
def prepare_command(
    text: Annotated[list[Path], typer.Option(help="Text files: .txt, .jsonl, or either .zst.")],
    out: Annotated[Path, typer.Option(help="Directory to make; it appears when it is complete.")],
    seq_len: Annotated[int, typer.Option(help="Tokens a row; a row holds one more, its target.")],
    vocab_size: Annotated[
        int | None, typer.Option(help="Token ids to train; with --tokenizer, the most allowed.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json to use instead of training one.")
    ] = None,
    end_of_text: Annotated[
        str | None, typer.Option(help="The token of --tokenizer that ends a document.")
    ] = None,
    val_text: Annotated[
        list[Path] | None, typer.Option(help="Text files for validation alone.")
    ] = None,
    val_fraction: Annotated[
        float, typer.Option(help="Share of the text held out for validation.")
    ] = VAL_FRACTION,
    text_field: Annotated[
        str, typer.Option(help="Field of a JSON line that holds the text.")
    ] = "text",
    record_format: Annotated[
        str, typer.Option("--format", help="text, or lines of JSON: chat, prompt-completion.")
    ] = "text",
    chat_template: Annotated[
        Path | None, typer.Option(help="A Jinja file; what lies beside --tokenizer else.")
    ] = None,
    pack: _Pack = False,
    attend_across: _AttendAcross = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out and count lines that are not valid.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Draws other documents for validation.")] = 0,
    rows_per_file: Annotated[int, typer.Option(help="Rows in one file.")] = ROWS_PER_FILE,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a data set that is there.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
) -> None:
    """Turn text into rows of token ids, with a tokenizer and a manifest.

    Documents end at <|endoftext|> in plain text and are one a line in .jsonl. Files may be larger
    than memory. OUT holds train/*.npy, val/*.npy, tokenizer.json and manifest.json; it is built
    beside its place and renamed, so an interrupt or a crash leaves what was there before.
    """
    options = PrepareOptions(
        text=tuple(text),
        out=out,
        seq_len=seq_len,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        end_of_text=end_of_text,
        val_text=tuple(val_text or ()),
        val_fraction=val_fraction,
        rules=ReadRules(text_field=text_field, skip_bad=skip_bad, form=record_format),
        overwrite=overwrite,
        seed=seed,
        rows_per_file=rows_per_file,
        chat_template=chat_template,
        pack=pack,
        attend_across=attend_across,
    )
    progress = TextProgress(sys.stderr)
    prepared = prepare(options, progress)
    for warning in prepared.warnings:
        progress.note(f"warning: {warning}")
    manifest = prepared.manifest.to_json().rstrip("\n")
    _say(manifest if as_json else "\n".join(_prepared_lines(prepared)))


@app.command("inspect", epilog=_INSPECT_EPILOG)
def inspect_command(
    directory: Annotated[Path, typer.Argument(help="A prepared directory, or a folder of .npy.")],
    sample: Annotated[int, typer.Option(min=0, help="Rows of each split to decode.")] = 1,
    tokenizer: Annotated[
        Path | None, typer.Option(help="The tokenizer.json to decode with, if none is beside.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every byte; exit 1 if something is damaged.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Show rows, largest id, tokens and a decoded sample of a data set. Changes nothing."""
    report = inspect(directory, sample_rows=sample, tokenizer=tokenizer, verify=verify)
    if as_json:
        _say(json.dumps(asdict(report), ensure_ascii=False, indent=2))
    else:
        _say("\n".join(_inspection_lines(report)))
    if report.findings:
        raise typer.Exit(1)


def main() -> None:
    """Run the command and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Parse and do; give the exit code. `--text a b c` means `--text a --text b --text c`."""
    earlier = {n: signal.signal(n, _stop) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        return answer(app, _spread_lists(arguments), "train-data")
    except _Stopped as stopped:
        name = signal.Signals(stopped.number).name
        return fail(f"{name}: stopped, nothing half-made is left", 128 + stopped.number)
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _spread_lists(arguments: Sequence[str]) -> list[str]:
    """Repeat a list's flag before each of its values, so that shell patterns can be used."""
    spread: list[str] = []
    flag = ""
    is_first = False
    for argument in arguments:
        if argument.startswith("-"):
            flag, is_first = (argument, True) if argument in _LIST_FLAGS else ("", False)
        elif flag and not is_first:
            spread.append(flag)
        else:
            is_first = False
        spread.append(argument)
    return spread


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    del frame
    raise _Stopped(number)


def _say(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # The reader has what it wanted, as `head` does; Python would try again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _prepared_lines(prepared: Prepared) -> Iterator[str]:
    manifest = prepared.manifest
    yield f"{prepared.path}: complete"
    for name in SPLITS:
        yield _split_line(name, manifest, manifest.split(name))
    trained = "trained here" if manifest.tokenizer_trained else "as given"
    yield (
        f"  {manifest.vocab_size:,} token ids ({trained}), {manifest.dtype}; "
        f"split by {manifest.split_by}"
    )
    yield _next_line(prepared)


def _next_line(prepared: Prepared) -> str:
    """Say what may be done with the rows: records are for a model that is there already."""
    path, size = prepared.path, prepared.manifest.vocab_size
    if prepared.manifest.masked:
        return (
            "next: import-hf MODEL --store run, then train --store run --lora-rank 16"
            f" --data-dir {path}/train --val-data-dir {path}/val"
        )
    return (
        f"next: train --store run --preset demo --vocab-size {size} --data-dir {path}/train"
        f" --val-data-dir {path}/val"
    )


def _split_line(name: str, manifest: Manifest, split: SplitEntry) -> str:
    return (
        f"  {name:<5} {split.rows:,} rows of {manifest.seq_len:,} + 1 tokens, from "
        f"{split.documents:,} documents, {split.tokens:,} tokens, largest id {split.largest_id:,}, "
        f"unigram entropy {split.unigram_entropy_nats:.3f} nats"
    )


def _inspection_lines(report: Inspection) -> Iterator[str]:
    vocabulary = f", {report.vocab_size:,} token ids" if report.vocab_size else ""
    split_by = f", split by {report.split_by}" if report.split_by else ", no manifest"
    yield f"{report.path}{vocabulary}{split_by}"
    for split in report.splits:
        yield from _report_lines(split)
    for finding in report.findings:
        yield f"finding: {finding.kind}: {finding.path}: {finding.message}"
    if report.verified:
        yield f"verified: {len(report.findings)} findings"


def _report_lines(split: SplitReport) -> Iterator[str]:
    yield (
        f"{split.name}: {split.rows:,} rows of {split.seq_len:,} + 1 tokens in {split.files} files"
    )
    yield f"  tokens {split.tokens:,}, {split.dtype}, largest id {split.largest_id:,}"
    if split.documents is not None:
        yield (
            f"  documents {split.documents:,}, distinct ids {split.distinct_ids:,}, "
            f"unigram entropy {split.unigram_entropy_nats:.3f} nats"
        )
    for sample in split.samples:
        if sample.text is None:
            yield f"  row {sample.row:,}: ids {' '.join(map(str, sample.ids[:32]))} ..."
        else:
            yield f"  row {sample.row:,}:"
            yield from (f"    {line}" for line in _printable(sample.text).splitlines())


def _printable(text: str) -> str:
    """Shorten a text and take out what a terminal would obey."""
    shown = text[:_SAMPLE_CHARACTERS]
    clean = "".join(
        c if c == "\n" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in shown
    )
    return clean + (" ..." if len(text) > _SAMPLE_CHARACTERS else "")
