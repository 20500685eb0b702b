"""The command `train-generate`: text from a run's newest commit, or from any it retains.

Owns the command line. It reads through a lease, so it works beside a live trainer and sees one
commit however far that goes on.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from trainer.command_cli import answer, let_waiting_threads_sleep, new_app
from trainer.errors import InputError

HELP = """Generate text from a training run.

\b
Examples:
  train-generate --store run --prompt "Once upon a time"
  train-generate --store run --ref step-200 --prompt "The king" --temperature 0

REF is a snapshot, a branch, a commit, or step-N; without it the newest commit is read. The text
is streamed to standard output. Nothing is written; an interrupt leaves nothing behind.
"""


def main() -> None:
    """Run the command and exit."""
    let_waiting_threads_sleep()
    try:
        sys.exit(answer(new_app(command, HELP), sys.argv[1:], "train-generate"))
    except KeyboardInterrupt:
        print()
        sys.exit(130)


def command(
    store: Annotated[str, typer.Option(help="The run's store.")],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "",
    ref: Annotated[str | None, typer.Option(help="Which commit to read.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens at most.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Choose among the K most likely; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Choose among this share of probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="A tokenizer.json of your own.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "cpu",
    allow_network: Annotated[bool, typer.Option(help="Read from a network file system.")] = False,
) -> int:
    """Stream text to standard output."""
    # torch takes seconds, and help should not.
    import shardb
    from trainer.generate import Sampling
    from trainer.generate_run import generated_text

    if max_new_tokens < 1:
        raise InputError(f"--max-new-tokens is {max_new_tokens}: give 1 or more")
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    with shardb.open(store, allow_network=allow_network) as opened, opened.at(ref=ref) as view:
        pieces = generated_text(
            view,
            prompt,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            seed=int.from_bytes(os.urandom(4)) if seed is None else seed,
            tokenizer_file=tokenizer,
            device=device,
        )
        print(prompt, end="", flush=True)
        for text in pieces:
            print(text, end="", flush=True)
        print()
    return 0


if __name__ == "__main__":
    main()
