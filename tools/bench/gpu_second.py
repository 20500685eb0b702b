"""What a second GPU's link is worth, or a processor's updates: `train` with and without.

Runs of the whole product on the same data, their steps interleaved; ratios of a round against the
first arm. Arms: one device; parameters over the links of two; some stages updated by the processor.
At the end the shards of one and two devices must have the same digests: exit 1 where they have not
(a processor's updates round otherwise).

    python -m tools.bench.gpu_second --model B --layers 8 --arms one,two --json second.json
    python -m tools.bench.gpu_second --model B --layers 8 --arms one,split --json split.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tools.bench.gpu_campaign import write_rows
from tools.bench.gpu_product import MODELS, Product, given_of
from tools.bench.gpu_throughput import WARM_STEPS, timed

ARMS: dict[str, dict[str, str]] = {
    "one": {},
    "two": {"prefetch_shards": "secondary-gpu"},
    "split": {"optimizer_device": "split"},
    "cpu": {"optimizer_device": "cpu"},
}
SAME_BITS = ("one", "two")


def measure(arguments: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    """Make both runs, step them in turn; give seconds of each round and what differs."""
    made: dict[str, Product] = {}
    for name in arguments.arms.split(","):
        folders = [
            Path(stack.enter_context(tempfile.TemporaryDirectory(dir=place)))
            for place in (arguments.store, arguments.active)
        ]
        given = given_of(arguments, folders[0], folders[1], arguments.vram_budget)
        if arguments.layers:
            given |= {"num_layers": arguments.layers}
        made[name] = Product(stack, given | ARMS[name])
        timed(made[name].run.engine.device, made[name].step, WARM_STEPS)
        print(f"{name}: ready", flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(arguments.rounds):
        for name, product in made.items():
            device = product.run.engine.device
            seconds[name].append(statistics.median(timed(device, product.step, arguments.steps)))
    same = [dict(made[name].run.head.shards) for name in made if name in SAME_BITS]
    different = [name for name in same[0] if same[0][name].digest != same[-1][name].digest]
    first = next(iter(made.values())).plan.recipe
    return {
        "model": arguments.model,
        "layers": first.model.num_layers,
        "tokens_per_step": first.rows_per_step * first.seq_len,
        "seconds": seconds,
        "different_shards": different,
        "last_lines": {name: product.lines[-2:] for name, product in made.items()},
        "on_the_processor": {
            name: product.plan.recipe.optimizer_host_stages for name, product in made.items()
        },
    }


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; 1 where a shard differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", help="folder of rows; random ids where none is given")
    parser.add_argument("--model", choices=MODELS, default="B")
    parser.add_argument("--arms", default="one,two", help=f"of {', '.join(ARMS)}, with commas")
    parser.add_argument("--layers", type=int, help="fewer blocks than the model has")
    parser.add_argument("--micro-batch-size", type=int, default=16)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--vram-budget", default="off")
    parser.add_argument("--gradient-placement", default="recompute")
    parser.add_argument("--activation-placement", default="vram")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--store", default="/tmp")
    parser.add_argument("--active", default="/dev/shm")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(words)
    arguments.pipeline, arguments.durable_every = "auto", 0
    arguments.learning_rate, arguments.max_grad_norm = 6e-4, 1000.0
    arguments.seq_len = 0
    with ExitStack() as stack:
        if arguments.data is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            a, b = write_rows(folder)
            is_b = arguments.model in ("B", "7B")
            arguments.data, arguments.seq_len = str(b if is_b else a), 1024 if is_b else 0
        result = measure(arguments, stack)
    tokens, base = result["tokens_per_step"], next(iter(result["seconds"].values()))
    for name, each in result["seconds"].items():
        ratios = [a / b for a, b in zip(base, each, strict=True)]
        print(
            f"{name}: {tokens / statistics.median(each):,.0f} tokens/s,"
            f" {statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f}) of the first"
        )
    print(f"{len(result['different_shards'])} shards differ that should not")
    if arguments.json:
        arguments.json.write_text(json.dumps(result))
    return 1 if result["different_shards"] else 0


if __name__ == "__main__":
    sys.exit(main())
