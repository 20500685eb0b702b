"""Where the time of a sweep goes when every request brings one token.

Sweeps of `--requests` requests in the middle of their answers are profiled operator by operator; a
share is of the time that all operators take themselves. Nothing is compared: it says what there is
to gain.

Usage: python -m tools.bench.serve_profile [--hidden 1024] [--layers 12] [--vocab 16000]
       [--dtype bf16] [--requests 16] [--prompt 64] [--sweeps 12] [--dir /dev/shm]
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

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

# Sweeps before the profiled ones: prompts are over by then.
SETTLED_SWEEPS = 6
KINDS = {
    "products with weights": ("linear", "addmm", "aten::mm"),
    "gathering pages and converting": ("index_select", "copy_"),
    "products of attention": ("bmm",),
    "sampling": ("log_softmax", "argmax", "sort", "abs", "isfinite", "aten::ne", "aten::eq"),
}


class ProfiledScheduler(Scheduler):
    """Profiles some of its sweeps, in the thread that makes them."""

    profiler: Any = None
    first_turn = 0
    last_turn = 0
    turns = 0

    def _turn(self) -> None:
        self.turns += 1
        if self.turns == self.first_turn:
            self.profiler = profile(activities=[ProfilerActivity.CPU])
            self.profiler.__enter__()
        super()._turn()
        if self.turns == self.last_turn:
            self.profiler.__exit__(None, None, None)


def shares(events: Iterable[Any]) -> dict[str, float]:
    """Give each kind's share of the operators' own time."""
    found: Counter[str] = Counter()
    for event in events:
        kind = next((k for k, words in KINDS.items() if any(w in event.key for w in words)), "else")
        found[kind] += event.self_cpu_time_total
    return {kind: value / found.total() for kind, value in found.most_common()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("hidden", 1024), ("layers", 12), ("vocab", 16000), ("requests", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("prompt", 64), ("sweeps", 12), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--dir", default="/dev/shm")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    config = geometry(args.hidden, args.layers, args.vocab)
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        write_store(Path(folder) / "run", config, random_weights(config, DTYPES[args.dtype]))
        pinned = PinnedModel.open(Path(folder) / "run")
        options = SchedulerOptions(dtype=args.dtype, kv_cache_bytes=1 << 29, prefill_chunk=1024)
        scheduler = ProfiledScheduler(options)
        asked = prompts(args.requests, args.prompt, args.vocab)
        serve_all(scheduler, pinned, asked, 2)
        scheduler.forget_prefixes()
        scheduler.first_turn = scheduler.turns + SETTLED_SWEEPS
        scheduler.last_turn = scheduler.first_turn + args.sweeps
        serve_all(scheduler, pinned, asked, SETTLED_SWEEPS + args.sweeps + 4)
        for kind, share in shares(scheduler.profiler.key_averages()).items():
            print(f"{kind:32} {share:6.1%}")
        scheduler.close()
        pinned.release()


if __name__ == "__main__":
    main()
