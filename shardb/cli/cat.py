"""The verb `cat`: what is in a shard."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from shardb.cli.places import JsonOption, NetworkOption, split_words
from shardb.cli.printing import number, print_json, print_table
from shardb.cli.progress import ProgressLine
from shardb.comparing import TensorNumbers, tensor_numbers
from shardb.errors import UsageError
from shardb.read_only import open_to_look
from shardb.views import ShardView


def cat(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[STORE] [REF] SHARD", help="The shard; REF: default main."),
    ] = None,
    raw: Annotated[
        str | None,
        typer.Option("--raw", metavar="TENSOR", help="Write this tensor's bytes, and no more."),
    ] = None,
    json: JsonOption = False,
    allow_network: NetworkOption = False,
) -> None:
    """Look into a shard: its tensors with data types, shapes, norms, ranges, and what is no number.

    Minimum, maximum and norm leave out NaN and infinity, which are counted. The object's digest is
    checked first. Memory does not grow with the size of a tensor.

    \b
    Examples:
      shardb cat run params/block_003              of the newest commit of main
      shardb cat run step-3000 params/block_003
      shardb cat run main meta/recipe --raw json   the recipe itself
      shardb cat run optim/lm_head --json

    Keys of --json: commit, step, shard, digest, bytes, and tensors: name to dtype, shape, norm,
    minimum, maximum, nan_count and infinite_count. It changes nothing that is committed; an
    interrupt leaves nothing behind.
    """
    if raw is not None and json:
        raise UsageError("--raw writes bytes and --json a document; give one of them")
    root, rest = split_words(words, "[STORE] [REF] SHARD", most=2)
    if not rest:
        raise UsageError("the shard is missing; expected [STORE] [REF] SHARD")
    ref = rest[0] if len(rest) == 2 else None
    with (
        ProgressLine() as progress,
        open_to_look(root, allow_network=allow_network) as opened,
        opened.at(ref=ref) as view,
    ):
        shard = view.read(rest[-1])
        commit = view.commit
        if raw is not None:
            sys.stdout.buffer.write(shard.raw(raw).data)
            sys.stdout.buffer.flush()
            return
        tensors = _numbers(shard, progress)
    if json:
        print_json(
            {
                "commit": commit.id,
                "step": commit.step,
                "shard": shard.name,
                "digest": shard.digest,
                "bytes": shard.bytes,
                "tensors": {name: _to_json(numbers) for name, numbers in tensors.items()},
            }
        )
        return
    written = commit.shards[shard.name].step
    print(f"{shard.name} of step {commit.step}, written by step {written}, digest {shard.digest}")
    print_table(
        ("tensor", "dtype", "shape", "norm", "min", "max", "not finite"),
        [_row(name, numbers) for name, numbers in tensors.items()],
    )


def _numbers(shard: ShardView, progress: ProgressLine) -> dict[str, TensorNumbers]:
    tensors: dict[str, TensorNumbers] = {}
    done_bytes = 0
    for name, spec in shard.specs.items():
        tensors[name] = tensor_numbers(shard, name)
        done_bytes += spec.bytes
        progress.show_bytes(f"reading {shard.name}", done_bytes, shard.bytes)
    return tensors


def _to_json(numbers: TensorNumbers) -> dict[str, Any]:
    return {
        "dtype": numbers.dtype,
        "shape": list(numbers.shape),
        "norm": numbers.norm,
        "minimum": numbers.minimum,
        "maximum": numbers.maximum,
        "nan_count": numbers.nan_count,
        "infinite_count": numbers.infinite_count,
    }


def _row(name: str, numbers: TensorNumbers) -> tuple[str, ...]:
    counts = {"NaN": numbers.nan_count, "infinite": numbers.infinite_count}
    return (
        name,
        numbers.dtype,
        "x".join(map(str, numbers.shape)) or "scalar",
        number(numbers.norm, ".6g"),
        number(numbers.minimum, ".4g"),
        number(numbers.maximum, ".4g"),
        ", ".join(f"{count:,} {what}" for what, count in counts.items() if count) or "-",
    )
