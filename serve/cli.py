"""The command `serve`: text over HTTP from the commits of a store.

Owns the command line. Everything is checked before the port is opened. torch is imported only once
the flags are parsed, so that help and mistyped flags answer at once.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from shardb.extras import install
from trainer.command_cli import answer, fail, let_waiting_threads_sleep, new_app

HELP = """Serve text from a store, also while it is being trained, over the OpenAI API.

Every request is pinned to one commit until its answer is whole. Nothing is exported or copied, and
stages that do not fit --max-resident-bytes are read from the store once a sweep for all requests.

\b
Examples:
  serve --store run                          the newest commit, as it is now
  serve --store run --follow                 new requests get the newest commit of a live run
  serve --store run --ref step-1200          one commit
  serve --store run --backup-store old       two models, `primary` and `backup`, to compare
  serve --store run --max-resident-bytes 2GB --device cuda --dtype bf16
  curl localhost:8010/v1/completions -d '{"model": "primary", "prompt": "The king"}'

REF is a snapshot, a branch, a commit, or step-N. Requests name a model: `primary`, `backup`, a REF,
or `STORE@REF` such as `run@step-1200`. A page to try it is at http://HOST:PORT/. The server listens
on this machine alone unless --host says otherwise; then give --api-key-file too.

The first SIGINT or SIGTERM lets running answers finish, for --drain-seconds; a second SIGINT stops
at once. Nothing is written but leases, and those end with the process, also by SIGKILL.
"""


def main() -> None:
    """Run the command and exit."""
    let_waiting_threads_sleep()
    sys.exit(answer(new_app(command, HELP), sys.argv[1:], "serve"))


def command(
    store: Annotated[str, typer.Option(help="The run's store, durable or active.")],
    ref: Annotated[str | None, typer.Option(help="Which commit `primary` means.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Move on with the branch.")] = False,
    backup_store: Annotated[str | None, typer.Option(help="The store of `backup`.")] = None,
    backup_ref: Annotated[str | None, typer.Option(help="Which commit `backup` means.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A folder with tokenizer.json, instead of the run's own.")
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="A Jinja chat template, instead of the model's own.")
    ] = None,
    chat_adapter: Annotated[
        str, typer.Option(help="Chats of models without a template: plain, story or none.")
    ] = "plain",
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.")] = 8010,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N or auto.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Compute in fp32, bf16 or fp16.")] = "fp32",
    max_resident_bytes: Annotated[
        str, typer.Option(help="Memory for stages that stay, such as 2GB; all, or 0 for none.")
    ] = "all",
    kv_cache_bytes: Annotated[str, typer.Option(help="Memory for keys and values.")] = "1GiB",
    preload: Annotated[bool, typer.Option("--preload", help="Read stages before asked.")] = False,
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens of a request a sweep.")] = 512,
    max_running: Annotated[int, typer.Option(help="Answers made at once.")] = 64,
    ngram_speculation: Annotated[
        int, typer.Option(help="Tokens guessed a sweep from earlier text; 0: none.")
    ] = 0,
    api_key: Annotated[
        list[str] | None, typer.Option(help="A key that clients need; others can see it in ps.")
    ] = None,
    api_key_file: Annotated[
        str | None, typer.Option(help="A file with one key a line, better than --api-key.")
    ] = None,
    max_queue: Annotated[int, typer.Option(help="Answers that may wait; 429 beyond.")] = 256,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most; 0: window.")] = 0,
    max_body_bytes: Annotated[str, typer.Option(help="The largest request.")] = "4MiB",
    max_connections: Annotated[int, typer.Option(help="Clients connected at once.")] = 1024,
    request_seconds: Annotated[float, typer.Option(help="Time for one answer at most.")] = 600.0,
    reader_seconds: Annotated[float, typer.Option(help="Time that a stuck reader gets.")] = 30.0,
    drain_seconds: Annotated[float, typer.Option(help="Time for answers after a signal.")] = 30.0,
    allow_network: Annotated[bool, typer.Option(help="Read from a network file system.")] = False,
) -> int:
    """Serve until a signal."""
    flags = dict(locals())  # each is a field of the options, by the same name
    try:
        from serve.start import StartOptions, serve
    except ImportError as error:
        return fail(f"{error.name} is missing: {install('serve')}", 2)
    return serve(StartOptions(**flags), lambda text: print(text, file=sys.stderr, flush=True))


if __name__ == "__main__":
    main()
