"""Serving without the model in memory beside accelerate's disk offload, interleaved.

Each arm is a process of its own that keeps nothing resident: our scheduler with no resident bytes,
over the store's objects, and `transformers` with every weight on disk (`device_map` all "disk").
Both read the same weights in the same dtype from the same disk, with the same threads. Warm: the
page cache may hold the files. Cold: each process is in a memory control group (version 1, made
below the one that this process is in, which takes root) too small to hold them, so that every
sweep reads the disk. Ratios are taken within a round.

Arrivals: `requests` clients that begin one after the other, each asking again as soon as it is
answered; the rate over the time in which all of them are busy is told as a share of the rate of a
static batch of the same size.

Usage: python -m tools.bench.serve_streamed --dir DISK [--hidden 1024] [--layers 24]
       [--vocab 16000] [--dtype bf16] [--threads 1] [--batches 1,4,16] [--new 8] [--rounds 3]
       [--limit-mib 0] [--speculation 4] [--json FILE]

It needs accelerate beside the test requirements.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from serve.pinned import PinnedModel
from serve.requests import Event, Finished, SamplingParameters, TokenEvent
from serve.scheduler import Scheduler, SchedulerOptions
from tools.bench.serve_models import (
    DTYPES,
    geometry,
    prompts,
    random_weights,
    serve_all,
    write_store,
)
from tools.bench.serve_resident import generate_arm, spread

CGROUPS = Path("/sys/fs/cgroup/memory")
PROMPT_TOKENS = 16
CACHE_BYTES = 48 << 20
Command = Callable[[Sequence[int]], dict[str, float]]


class Arm:
    """A process that answers commands with numbers."""

    def __init__(self, kind: str, folder: Path, args: argparse.Namespace) -> None:
        options = ["--arm", kind, "--dir", str(folder), "--vocab", str(args.vocab)]
        options += ["--dtype", args.dtype, "--threads", str(args.threads)]
        options += ["--limit-mib", str(args.limit_mib), "--speculation", str(args.speculation)]
        self._is_limited = args.limit_mib > 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.bench.serve_streamed", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, *words: object) -> dict[str, float]:
        """Send one command and wait for its numbers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(*words, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, float] = json.loads(line)
                return found
        raise SystemExit(f"an arm ended: exit code {self._process.wait()}")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        if self._is_limited:
            limit_group(self._process.pid).rmdir()


def answer_commands(commands: dict[str, Command]) -> None:
    """Read commands from standard input until it ends."""
    for line in sys.stdin:
        name, *numbers = line.split()
        found = commands[name]([int(number) for number in numbers])
        found["peak_mib"] = _status_mib("VmHWM")
        found["anonymous_mib"] = _status_mib("RssAnon")
        print(json.dumps(found), flush=True)


def _status_mib(name: str) -> float:
    """Give a line of the process's status: VmHWM, the peak, or RssAnon, what is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def ours(args: argparse.Namespace) -> None:
    """Serve from the store with nothing resident."""
    pinned = PinnedModel.open(Path(args.dir) / "run")
    plain = SchedulerOptions(
        dtype=args.dtype, max_resident_bytes=0, kv_cache_bytes=CACHE_BYTES, prefill_chunk=1024
    )
    scheduler = Scheduler(plain)

    def static(numbers: Sequence[int]) -> dict[str, float]:
        requests, new_tokens = numbers
        scheduler.forget_prefixes()
        before = scheduler.statistics()
        started = time.perf_counter()
        serve_all(scheduler, pinned, prompts(requests, PROMPT_TOKENS, args.vocab), new_tokens)
        seconds = time.perf_counter() - started
        after = scheduler.statistics()
        reading = after.read_seconds - before.read_seconds
        waiting = after.wait_seconds - before.wait_seconds
        return {
            "rate": requests * new_tokens / seconds,
            "mib_a_token": (after.bytes_read - before.bytes_read) / 2**20 / requests / new_tokens,
            "hidden_share": max(0.0, 1 - waiting / reading) if reading else 1.0,
        }

    def arrivals(numbers: Sequence[int]) -> dict[str, float]:
        return {"rate": arriving_rate(scheduler, pinned, args.vocab, *numbers)}

    def guessing(numbers: Sequence[int]) -> dict[str, float]:
        new_tokens = numbers[0]
        found = {}
        for count in (0, args.speculation):
            options = SchedulerOptions(
                dtype=args.dtype, max_resident_bytes=0, kv_cache_bytes=CACHE_BYTES,
                ngram_speculation=count,
            )  # fmt: skip
            tried = Scheduler(options)
            started = time.perf_counter()
            [told] = serve_all(tried, pinned, prompts(1, PROMPT_TOKENS, args.vocab), new_tokens)
            found[f"rate_{count}"] = new_tokens / (time.perf_counter() - started)
            found[f"sweeps_{count}"] = tried.statistics().sweeps
            found[f"text_{count}"] = float(hash(tuple(told.tokens)) % 2**31)
            tried.close()
        return found

    answer_commands({"static": static, "arrivals": arrivals, "guessing": guessing})
    scheduler.close()
    pinned.release()


def arriving_rate(
    scheduler: Scheduler, pinned: PinnedModel, vocab: int, requests: int, new_tokens: int
) -> float:
    """Give tokens a second while all of `requests` clients, which began apart, are busy."""
    times: list[float] = []
    asked = prompts(requests, PROMPT_TOKENS, vocab)
    busy: list[float] = []
    ended: list[float] = []
    done = threading.Event()

    def client(index: int, turns: int) -> None:
        def sink(event: Event) -> None:
            if isinstance(event, TokenEvent):
                times.append(time.perf_counter())
            elif isinstance(event, Finished):
                if turns > 1:
                    client(index, turns - 1)
                else:
                    ended.append(time.perf_counter())
                    if len(ended) == requests:
                        done.set()

        # Answers of different lengths: clients stay apart.
        parameters = SamplingParameters(
            max_tokens=new_tokens + index % 5, temperature=0.0, ignore_eos=True
        )
        scheduler.submit(pinned, asked[index], parameters, sink)

    for index in range(requests):
        client(index, 3)
        time.sleep(0.02)
    busy.append(time.perf_counter())
    done.wait()
    first, last = busy[0], min(ended)
    return sum(first <= each < last for each in times) / (last - first)


def theirs(args: argparse.Namespace) -> None:
    """Serve with accelerate's disk offload."""
    transformers: Any = importlib.import_module("transformers")
    folder = Path(args.dir)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "package",
        dtype=DTYPES[args.dtype],
        device_map={"model": "disk", "lm_head": "disk"},
        offload_folder=folder / "offload",
    )

    def static(numbers: Sequence[int]) -> dict[str, float]:
        requests, new_tokens = numbers
        arm = generate_arm(model, prompts(requests, PROMPT_TOKENS, args.vocab), new_tokens)
        started = time.perf_counter()
        return {"rate": arm() / (time.perf_counter() - started)}

    answer_commands({"static": static})


def limit_group(process_id: int) -> Path:
    """Give the folder of a process's own control group, below the one that this tool is in."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    line = next(text for text in lines if ":memory:" in text)
    return CGROUPS / line.split(":", 2)[2].lstrip("/") / f"serve-bench-{process_id}"


def enter_limit(limit_mib: int) -> None:
    """Put this process into a memory control group of its own."""
    group = limit_group(os.getpid())
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(limit_mib << 20))
    (group / "cgroup.procs").write_text(str(os.getpid()))


def prepare(folder: Path, args: argparse.Namespace) -> float:
    """Write the same weights as a store and as a package; give their size in MiB."""
    config = geometry(args.hidden, args.layers, args.vocab)
    weights = random_weights(config, DTYPES[args.dtype])
    write_store(folder / "run", config, weights)
    llama = importlib.import_module("tests.support.llama")
    llama.llama_of(config, weights, DTYPES[args.dtype]).save_pretrained(folder / "package")
    forget_cached(folder)
    tensors = [tensor for stage in weights.values() for tensor in stage.values()]
    return sum(tensor.nbytes for tensor in tensors) / 2**20


def forget_cached(folder: Path) -> None:
    """Take files out of the page cache, so that whoever reads them next is charged for them."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def compare(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run every arm in turn and print the ratios."""
    arms = {"ours": Arm("ours", folder, args), "accelerate": Arm("accelerate", folder, args)}
    rows: dict[str, Any] = {}
    for batch in [int(text) for text in args.batches.split(",")]:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
        for index in range(args.rounds + 1):
            for name in arms if index % 2 else reversed(arms):
                numbers = arms[name].ask("static", batch, args.new)
                if index:
                    found[name].append(numbers)
        rates = {name: [each["rate"] for each in told] for name, told in found.items()}
        ratios = [a / b for a, b in zip(rates["ours"], rates["accelerate"], strict=True)]
        rows[f"batch {batch}"] = {
            "ours, tokens/s": spread(rates["ours"]),
            "accelerate, tokens/s": spread(rates["accelerate"]),
            "ratio": spread(ratios),
            "MiB read a token": round(found["ours"][-1]["mib_a_token"], 1),
            "share of reading hidden": round(
                statistics.median(each["hidden_share"] for each in found["ours"]), 2
            ),
            "peak MiB": {name: round(told[-1]["peak_mib"]) for name, told in found.items()},
            "of which no file's": {
                name: round(told[-1]["anonymous_mib"]) for name, told in found.items()
            },
        }
        print(f"batch {batch}: {json.dumps(rows[f'batch {batch}'])}", flush=True)
    requests = max(int(text) for text in args.batches.split(","))
    shares = []
    for _ in range(args.rounds):
        static = arms["ours"].ask("static", requests, 3 * args.new)["rate"]
        shares.append(arms["ours"].ask("arrivals", requests, 3 * args.new)["rate"] / static)
    rows["arrivals / static"] = spread(shares)
    print(f"arrivals apart / static batch of {requests}: {spread(shares)}", flush=True)
    rows["guessing"] = arms["ours"].ask("guessing", 4 * args.new)
    print(f"guessing {args.speculation} tokens a sweep: {json.dumps(rows['guessing'])}")
    for arm in arms.values():
        arm.close()
    return rows


def main() -> None:
    """Measure and print, or be one of the arms."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("hidden", 1024), ("layers", 24), ("vocab", 16000), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("new", 8), ("rounds", 3), ("limit-mib", 0), ("speculation", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--dir", required=True)
    parser.add_argument("--arm", choices=("ours", "accelerate"))
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.arm is not None:
        if args.limit_mib:
            enter_limit(args.limit_mib)
        (ours if args.arm == "ours" else theirs)(args)
        return
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        size_mib = prepare(Path(name), args)
        print(f"weights {size_mib:.0f} MiB in {args.dtype}; limit {args.limit_mib or 'none'} MiB")
        rows = compare(Path(name), args)
    if args.json:
        Path(args.json).write_text(json.dumps({"arguments": vars(args), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
