"""The command `export-hf`: a commit as a package that transformers, vLLM and their kin load.

Owns the command line and what is printed.
"""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from export import options_cli as options
from trainer.command_cli import run_command
from trainer.errors import InputError
from trainer.sizes import in_bytes, size_of

if TYPE_CHECKING:
    from export.hf_export import ExportReport

DTYPES = ("fp32", "bf16", "fp16")
HELP = """Export a commit of a store as a Hugging Face package.

\b
Examples:
  export-hf run --out package
  export-hf run --ref step-3000 --out package --dtype bf16 --overwrite
  export-hf run --average step-2800,step-2900,step-3000 --out mean
  export-hf run --out package --reference-logits package.npz
  export-hf run --out adapter --adapter      what `train --lora-rank` trained, for peft
  export-hf run --out adapter --adapter --base-model meta/model   with the name of its base
  export-hf run --out package --merge        the base with it
  export-hf run --out package --merge --merge-into imported   not the base as it was packed

The commit is leased, so a live trainer may go on. Weights are streamed: memory is that of the
largest shard. A fresh offline process then loads the package (with transformers where that is
installed: extra hf) and must give the store's logits; else nothing is published. The package is
built beside its folder and renamed, whole or not at all. An interrupt leaves nothing behind; what a
kill leaves, the next export to the same folder removes.
"""


def main() -> None:
    """Run the command and exit."""
    run_command(command, HELP, "export-hf")


def command(
    store: options.Store,
    out: Annotated[Path, typer.Option(help="The package's folder.")],
    ref: options.Ref = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16; as imported, else fp32.")
    ] = None,
    tokenizer: options.Tokenizer = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest weight file.")] = "5GB",
    overwrite: Annotated[bool, typer.Option(help="Replace the package at --out.")] = False,
    average: options.Average = None,
    reference_logits: Annotated[
        Path | None, typer.Option(help="Also write ids and fp32 logits to this .npz file.")
    ] = None,
    adapter: Annotated[bool, typer.Option(help="The adapters alone, as peft loads them.")] = False,
    base_model: Annotated[
        str | None, typer.Option(help="With --adapter: name or folder of the base, for peft.")
    ] = None,
    merge: Annotated[bool, typer.Option(help="Merge the adapters into their base.")] = False,
    merge_into: options.MergeInto = None,
    chat_template: Annotated[Path | None, typer.Option(help="A Jinja file.")] = None,
    allow_padded_vocabulary: options.AllowPaddedVocabulary = False,
    allow_network: options.AllowNetwork = False,
    json: options.Json = False,
) -> int:
    """Export and say what was made."""
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"--dtype is {dtype!r}: choose from {', '.join(DTYPES)}")
    max_file_bytes = size_of(max_shard_size, "--max-shard-size")
    if adapter:
        refused = {
            "--merge": merge,
            "--merge-into": merge_into,
            "--average": average,
            "--dtype": dtype,
        }
        _refuse_beside_adapter([flag for flag, value in refused.items() if value])
        return _export_adapter(store, out, ref, base_model, overwrite, allow_network, json)
    if base_model is not None:
        raise InputError("--base-model names the base of adapters: give --adapter, or leave it out")
    # torch takes seconds, and help should not.
    from export.hf_export import export_package
    from export.hf_plan import ExportRequest

    report = export_package(
        ExportRequest(
            store=store,
            out=out,
            ref=ref,
            average=options.refs_of(average),
            dtype=dtype,
            tokenizer=tokenizer,
            max_file_bytes=max_file_bytes,
            overwrite=overwrite,
            reference_logits=reference_logits,
            chat_template=chat_template,
            allow_padded_vocabulary=allow_padded_vocabulary,
            allow_network=allow_network,
            merge=merge,
            merge_into=merge_into,
        )
    )
    print(json_text.dumps(report.to_json()) if json else _text(report))
    return 0


def _refuse_beside_adapter(flags: list[str]) -> None:
    if flags:
        raise InputError(f"{flags[0]} is of a whole model: leave it out, or leave out --adapter")


def _export_adapter(
    store: str,
    out: Path,
    ref: str | None,
    base_model: str | None,
    overwrite: bool,
    allow_network: bool,
    json: bool,
) -> int:
    from export.peft_export import export_adapter

    report = export_adapter(
        store,
        out,
        ref=ref,
        overwrite=overwrite,
        allow_network=allow_network,
        base_model=base_model,
    )
    if json:
        print(json_text.dumps(report.to_json()))
        return 0
    print(
        f"{report.out}: step {report.step:,}, {report.tensors} tensors of adapters with"
        f" {report.parameters:,} parameters, {in_bytes(report.bytes)}; {report.nonzero_tensors} of"
        " them are not zero"
    )
    return 0


def _text(report: ExportReport) -> str:
    from export.model_card import check_text

    files = f"{len(report.files)} files" if len(report.files) > 1 else report.files[0]
    size, peak = in_bytes(report.model_bytes), in_bytes(report.peak_memory_bytes)
    checking = in_bytes(report.check_peak_memory_bytes)
    lines = [
        f"{report.out}: step {report.step:,} in {report.dtype}, {size} of weights in {files}",
        f"  {check_text(report.check)}",
        f"  peak memory {peak} for a model of {size}; {checking} in the process of the check",
    ]
    if report.rounded_to_zero:
        lines.append(f"  {report.rounded_to_zero:,} weights are too small for it and became 0")
    if report.check.not_checked:
        lines.append(f"  not checked: {report.check.not_checked}")
    notes = (*report.notes, *report.check.disagreements)
    return "\n".join([*lines, *(f"  note: {note}" for note in notes)])


if __name__ == "__main__":
    main()
