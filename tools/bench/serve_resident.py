"""Serving with every stage in memory beside `transformers` generate, interleaved.

Arms, on the same weights, dtype, device and threads, greedy: `generate` for one prompt; `generate`
for all prompts as one static batch; our scheduler with one request, and with all at once. Ratios
are taken within a round. A server of `generate` takes requests one after the other, so its rate at
16 requests is that of one prompt; the static batch, for which all prompts must be there at once and
equally long, is the harder bar and is told too.

Usage: python -m tools.bench.serve_resident [--hidden 1024] [--layers 12] [--vocab 16000]
       [--dtype bf16] [--threads 1] [--requests 16] [--prompt 64] [--new 24] [--rounds 5]
       [--curve 1,2,4,8,16,32] [--dir /dev/shm] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from serve.pinned import PinnedModel
from serve.scheduler import Scheduler, SchedulerOptions
from tools.bench.serve_models import (
    DTYPES,
    geometry,
    prompts,
    random_weights,
    serve_all,
    write_store,
)

Arm = Callable[[], int]


def generate_arm(model: Any, asked: Sequence[Sequence[int]], new_tokens: int) -> Arm:
    """Give an arm that answers all prompts with one call of `generate`."""
    batch = torch.tensor(asked)

    def run() -> int:
        with torch.inference_mode():
            found = model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return int(found[:, batch.shape[1] :].numel())

    return run


def our_arm(
    scheduler: Scheduler, pinned: PinnedModel, asked: Sequence[Sequence[int]], new_tokens: int
) -> Arm:
    """Give an arm that answers all prompts as requests at once."""

    def run() -> int:
        # Without this the second round would find every prompt's keys in the cache.
        scheduler.forget_prefixes()
        found = serve_all(scheduler, pinned, asked, new_tokens)
        return sum(len(each.tokens) for each in found)

    return run


def tokens_per_second(arm: Arm) -> float:
    """Time one run of an arm."""
    started = time.perf_counter()
    return arm() / (time.perf_counter() - started)


def spread(values: Sequence[float]) -> str:
    """Give median and range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def measure(arms: dict[str, Arm], rounds: int) -> dict[str, list[float]]:
    """Run every arm once a round, the order turned about each time; the first round is dropped."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    for index in range(rounds + 1):
        names = list(arms) if index % 2 else list(reversed(arms))
        for name in names:
            rate = tokens_per_second(arms[name])
            if index:
                found[name].append(rate)
    return found


def report(found: dict[str, list[float]], requests: int) -> dict[str, str]:
    """Print rates and ratios; give them by name."""
    many = f"{requests}"
    pairs = [
        ("ours 1 / generate 1", "ours 1", "generate 1"),
        (f"ours {many} / generate one by one", f"ours {many}", "generate 1"),
        (f"ours {many} / generate static {many}", f"ours {many}", f"generate {many}"),
    ]
    rows = {f"{name}, tokens/s": spread(rates) for name, rates in found.items()}
    for title, ours, theirs in pairs:
        rows[title] = spread([a / b for a, b in zip(found[ours], found[theirs], strict=True)])
    for title, text in rows.items():
        print(f"{title:44} {text}")
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("hidden", 1024), ("layers", 12), ("vocab", 16000), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("requests", 16), ("prompt", 64), ("new", 24), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--curve", default="")
    parser.add_argument("--dir", default="/dev/shm")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    config = geometry(args.hidden, args.layers, args.vocab)
    weights = random_weights(config, DTYPES[args.dtype])
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        write_store(Path(folder) / "run", config, weights)
        llama = importlib.import_module("tests.support.llama")
        model = llama.llama_of(config, weights, DTYPES[args.dtype]).eval()
        del weights
        pinned = PinnedModel.open(Path(folder) / "run")
        scheduler = Scheduler(
            SchedulerOptions(dtype=args.dtype, kv_cache_bytes=1 << 29, prefill_chunk=1024)
        )
        asked = prompts(max(args.requests, 64), args.prompt, args.vocab)
        many = asked[: args.requests]
        arms = {
            "generate 1": generate_arm(model, many[:1], args.new),
            "ours 1": our_arm(scheduler, pinned, many[:1], args.new),
            f"generate {args.requests}": generate_arm(model, many, args.new),
            f"ours {args.requests}": our_arm(scheduler, pinned, many, args.new),
        }
        rows = report(measure(arms, args.rounds), args.requests)
        for size in [int(text) for text in args.curve.split(",") if text]:
            arm = our_arm(scheduler, pinned, asked[:size], args.new)
            rates = [tokens_per_second(arm) for _ in range(3)]
            rows[f"curve: {size} requests a sweep, tokens/s"] = spread(rates)
            print(f"curve: {size:3} requests a sweep, tokens/s {spread(rates)}", flush=True)
        scheduler.close()
        pinned.release()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory of all arms together {peak:.0f} MiB")
    if args.json:
        Path(args.json).write_text(json.dumps({"arguments": vars(args), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
