"""How long a request waits for its first token while eight others run.

Eight clients ask again as they are answered; beside them probes arrive at random moments. Arms, on
the same weights, dtype, threads and moments: our scheduler, which takes a request into the next
sweep; the same scheduler behind a door that opens only when all that went in together have been
answered, which is what a static server does; and `transformers` generate behind that door. A wait
is that of a probe, from its arrival to its first token, which the server sends on at once. Rounds
are interleaved, and ratios are those of a round's medians.

Usage: python -m tools.bench.serve_first_byte [--hidden 512] [--layers 8] [--vocab 8000]
       [--dtype bf16] [--threads 1] [--clients 8] [--prompt 64] [--new 48] [--probes 20]
       [--gap 0.25] [--rounds 3] [--dir /dev/shm] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from serve.pinned import PinnedModel
from serve.requests import Event, Finished, SamplingParameters
from serve.scheduler import Scheduler, SchedulerOptions
from tools.bench.serve_models import DTYPES, geometry, prompts, random_weights, write_store

PROBE_NEW = 8


@dataclass
class Asked:
    """One request: when it came, when its first token did, whether it was answered."""

    prompt: Sequence[int]
    new_tokens: int
    arrived: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    ended: threading.Event = field(default_factory=threading.Event)

    def see_token(self) -> None:
        """Note the first token's moment."""
        self.first = self.first or time.perf_counter()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Finished):
            self.ended.set()
        else:
            self.see_token()


Server = Callable[[Asked], None]
Batch = Callable[[Sequence[Asked]], None]


class ClosedDoor:
    """Lets all that wait in together, when all that went in before have been answered."""

    def __init__(self, batch: Batch, most: int) -> None:
        self._batch = batch
        self._most = most
        self._waiting: queue.Queue[Asked | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def __call__(self, asked: Asked) -> None:
        self._waiting.put(asked)

    def close(self) -> None:
        """Answer what waits, and end."""
        self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (first := self._waiting.get()) is not None:
            found = [first]
            while len(found) < self._most and not self._waiting.empty():
                following = self._waiting.get()
                if following is None:
                    self._waiting.put(None)
                    break
                found.append(following)
            self._batch(found)


def sweeps(scheduler: Scheduler, pinned: PinnedModel) -> Server:
    """Give a server that takes every request at once."""

    def serve(asked: Asked) -> None:
        parameters = SamplingParameters(
            max_tokens=asked.new_tokens, temperature=0.0, ignore_eos=True
        )
        scheduler.submit(pinned, asked.prompt, parameters, asked)

    return serve


def sweeps_in_batches(scheduler: Scheduler, pinned: PinnedModel) -> Batch:
    """Give a batch that our scheduler answers."""
    serve = sweeps(scheduler, pinned)

    def batch(found: Sequence[Asked]) -> None:
        for asked in found:
            serve(asked)
        for asked in found:
            asked.ended.wait()

    return batch


def generate_in_batches(model: Any) -> Batch:
    """Give a batch that `generate` answers; each token is seen as soon as it is chosen."""

    def batch(found: Sequence[Asked]) -> None:
        ids = torch.tensor([asked.prompt for asked in found])
        most = max(asked.new_tokens for asked in found)

        def seen(so_far: Any, *_: Any, **__: Any) -> Any:
            for asked in found:
                asked.see_token()
                if so_far.shape[1] - ids.shape[1] >= asked.new_tokens:
                    asked.ended.set()
            return torch.zeros(len(found), dtype=torch.bool)

        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=most,
                min_new_tokens=most,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=[seen],
            )

    return batch


def waits(
    server: Server, texts: Iterator[list[int]], gaps: Sequence[float], *, clients: int, new: int
) -> list[float]:
    """Keep the clients asking while probes arrive; give the probes' waits in seconds."""
    over = threading.Event()

    def client() -> None:
        while not over.is_set():
            asked = Asked(prompt=next(texts), new_tokens=new)
            server(asked)
            asked.ended.wait()

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    probes = []
    for gap in gaps:
        time.sleep(gap)
        probes.append(Asked(prompt=next(texts), new_tokens=PROBE_NEW))
        server(probes[-1])
    for probe in probes:
        probe.ended.wait()
    over.set()
    for thread in threads:
        thread.join()
    return [probe.first - probe.arrived for probe in probes]


def report(found: dict[str, list[list[float]]]) -> dict[str, str]:
    """Print and give median and 95th percentile of all waits, and the ratios of rounds."""
    rows = {}
    for name, rounds in found.items():
        values = np.array(list(itertools.chain(*rounds))) * 1000
        rows[f"{name}: median, 95th percentile, ms"] = (
            f"{np.median(values):.0f}, {np.percentile(values, 95):.0f}"
        )
    ours = [statistics.median(each) for each in found["sweeps"]]
    for name in found:
        if name != "sweeps":
            theirs = [statistics.median(each) for each in found[name]]
            ratios = sorted(b / a for a, b in zip(ours, theirs, strict=True))
            rows[f"{name} / sweeps, of medians"] = (
                f"{statistics.median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f})"
            )
    for title, text in rows.items():
        print(f"{title:60} {text}")
    return rows


def measure(args: argparse.Namespace, folder: str) -> dict[str, list[list[float]]]:
    """Run every arm once a round, after a short run of each that is dropped."""
    config = geometry(args.hidden, args.layers, args.vocab)
    weights = random_weights(config, DTYPES[args.dtype])
    write_store(Path(folder) / "run", config, weights)
    llama = importlib.import_module("tests.support.llama")
    model = llama.llama_of(config, weights, DTYPES[args.dtype]).eval()
    pinned = PinnedModel.open(Path(folder) / "run")
    scheduler = Scheduler(SchedulerOptions(dtype=args.dtype, kv_cache_bytes=1 << 28))
    most = 2 * args.clients
    doors = {
        "same, between batches": ClosedDoor(sweeps_in_batches(scheduler, pinned), most),
        "generate, between batches": ClosedDoor(generate_in_batches(model), most),
    }
    servers: dict[str, Server] = {"sweeps": sweeps(scheduler, pinned), **doors}
    found: dict[str, list[list[float]]] = {name: [] for name in servers}
    for index in range(args.rounds + 1):
        draw = np.random.default_rng(index)
        gaps = draw.exponential(args.gap, args.probes if index else 2)
        for name in list(servers) if index % 2 else list(reversed(servers)):
            scheduler.forget_prefixes()
            texts = itertools.cycle(prompts(512, args.prompt, args.vocab))
            how = {"clients": args.clients, "new": args.new}
            values = waits(servers[name], texts, gaps.tolist(), **how)
            if index:
                found[name].append(values)
    for door in doors.values():
        door.close()
    scheduler.close()
    pinned.release()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("hidden", 512), ("layers", 8), ("vocab", 8000), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("clients", 8), ("prompt", 64), ("new", 48), ("probes", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gap", type=float, default=0.25)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--dir", default="/dev/shm")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        rows = report(measure(args, folder))
    if args.json:
        Path(args.json).write_text(json.dumps({"arguments": vars(args), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
