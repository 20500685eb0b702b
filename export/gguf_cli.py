"""The command `export-gguf`: a commit as one file that llama.cpp and its kin load.

Owns the command line and what is printed.
"""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import Annotated

import typer

from export import options_cli as options
from trainer.command_cli import run_command
from trainer.sizes import in_bytes

HELP = """Export a commit of a store as a GGUF file.

\b
Examples:
  export-gguf run --out model.gguf
  export-gguf run --ref step-3000 --out model.gguf --type q8_0 --overwrite
  export-gguf run --out model.gguf --tokenizer folder --pre llama-bpe

TYPE is f32, f16, bf16 or q8_0; norms and biases stay f32. It needs the package gguf (extra gguf).
The file is written beside its name, read back and compared with the store tensor by tensor, and
renamed, whole or not at all; where the package llama_cpp is installed, a fresh process loads it and
must give the store's logits. An interrupt leaves nothing behind; what a kill leaves, the next
export to the same name removes.
"""


def main() -> None:
    """Run the command and exit."""
    run_command(command, HELP, "export-gguf")


def command(
    store: options.Store,
    out: Annotated[Path, typer.Option(help="The file to write.")],
    ref: options.Ref = None,
    type: Annotated[str, typer.Option(help="f32, f16, bf16 or q8_0.")] = "f16",
    tokenizer: options.Tokenizer = None,
    pre: Annotated[
        str | None, typer.Option(help="llama.cpp's name for how texts are cut; recognised else.")
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace the file at --out.")] = False,
    average: options.Average = None,
    merge_into: options.MergeInto = None,
    allow_padded_vocabulary: options.AllowPaddedVocabulary = False,
    allow_network: options.AllowNetwork = False,
    json: options.Json = False,
) -> int:
    """Export and say what was made."""
    # torch takes seconds, and help should not.
    from export.gguf_export import GgufRequest, export_gguf
    from export.model_card import check_text

    report = export_gguf(
        GgufRequest(
            store=store,
            out=out,
            ref=ref,
            average=options.refs_of(average),
            form=type,
            tokenizer=tokenizer,
            pre=pre,
            overwrite=overwrite,
            allow_padded_vocabulary=allow_padded_vocabulary,
            allow_network=allow_network,
            merge_into=merge_into,
        )
    )
    if json:
        print(json_text.dumps(report.to_json()))
        return 0
    size, peak = in_bytes(report.file_bytes), in_bytes(report.peak_memory_bytes)
    print(f"{report.out}: step {report.step:,} as {report.architecture} in {report.form}, {size}")
    print(f"  read back: all {report.tensors_compared} tensors are those of the store")
    if report.check is not None:
        print(f"  {check_text(report.check)}")
    else:
        print(
            "  not checked: llama.cpp itself did not load it, for llama_cpp is not installed here"
        )
    print(f"  tokenizer {report.tokenizer}; peak memory {peak}")
    for note in report.notes:
        print(f"  note: {note}")
    return 0


if __name__ == "__main__":
    main()
