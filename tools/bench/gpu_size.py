"""How large a model trains in little device memory: 7 B parameters, real AdamW steps, commits.

Runs `train` on a store of its own on a RAM disk, which keeps one commit beside the step in work, so
that fp32 weights and bf16 moments (8 bytes a parameter) lie in memory twice. Prints what the
pre-flight predicts, then every step as it comes, and at the end what was measured beside it, with
the largest model that the same memory could train resident. Ends within --limit-seconds, whatever
has come by then, and leaves nothing on the RAM disk.

    python -m tools.bench.gpu_size --mount-gib 106 --json size.json           the 7 B geometry
    python -m tools.bench.gpu_size --model tiny --device cpu --seq-len 64     a try without a GPU
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import shardb
from shardb import branching
from shardb.retention import Policy
from tools.bench.gpu_product import MODELS
from tools.bench.ram_room import GIB, SpareFiles, Watch, memory_of_machine, ram_disk
from tools.evidence_runs import step_lines
from trainer.budget import shard_bytes, step_shape
from trainer.ceiling import FILE_NAME, step_flops
from trainer.model.config import ModelConfig
from trainer.model.stages import parameter_count
from trainer.options import EngineOptions
from trainer.recipe import Recipe, Settings
from trainer.recipe_build import DataFacts, new_model, new_run
from trainer.sizes import in_bytes, size_of
from trainer.step_memory import DeviceNeed, device_need

STATE = "bf16"
COPIES = 2  # the commit that is kept, and the step in work
# Budgets are filled, and more is compiled and recorded, up to the sixth step.
STEADY_STEP = 7
WARMUP_STEPS = 4
# Each of the processes that compile takes half a GiB.
ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
TERMINATED = 128 + signal.SIGTERM
STOP_SECONDS, WARM_SHARE = 25.0, 0.25
# fp32 weights, gradients and two moments; with moments in bf16.
RESIDENT_BYTES = {"fp32": 16, "bf16": 12}


@dataclass(kw_only=True)
class Clock:
    """The time since the beginning, and what is left of the limit."""

    limit_seconds: float
    began: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """Print a line with the time at which it came."""
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", flush=True)

    @property
    def left_seconds(self) -> float:
        return self.limit_seconds - (time.monotonic() - self.began)


def write_rows(folder: Path, vocabulary: int, seq_len: int, rows: int) -> Path:
    """Make rows of ids that are not equally frequent, so that there is something to learn."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    ids = np.minimum(random.zipf(1.3, rows * seq_len + 1), vocabulary) - 1
    (folder / "rows.bin").write_bytes(ids.astype("<u2").tobytes())
    return folder


def tokens_per_step(arguments: argparse.Namespace) -> int:
    """Give the tokens of a step."""
    tokens: int = arguments.micro_batch_size * arguments.accumulation * arguments.seq_len
    return tokens


def flags_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Give the flags of the run that are not places."""
    return {
        **MODELS[arguments.model],
        "max_position_embeddings": arguments.seq_len,
        "data_dtype": "uint16",
        "seq_len": arguments.seq_len,
        "device_pipeline": "on",
        "dtype": "bf16",
        "optimizer_state_dtype": STATE,
        "activations": "recompute",
        "activation_placement": "host",
        "gradient_placement": "recompute",
        "micro_batch_size": arguments.micro_batch_size,
        "gradient_accumulation_steps": arguments.accumulation,
        "lm_head_chunk_tokens": arguments.chunk,
        "learning_rate": arguments.learning_rate,
        "warmup_tokens": WARMUP_STEPS * tokens_per_step(arguments),
        "max_grad_norm": arguments.max_grad_norm,
        "max_steps": arguments.steps,
        "validate_every": 0,
        "seed": 3,
        "vram_budget": arguments.vram_budget,
        "pinned_budget": arguments.pinned_budget,
    }


def train_words(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Give the words behind `python -m` of the run."""
    places = {"store": folder / "run", "data_dir": folder / "rows", "device": arguments.device}
    given = {**flags_of(arguments), **places}
    return ["trainer.cli", *(w for k, v in given.items() for w in (_flag(k), str(v)))]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def new_store(folder: Path) -> None:
    """Make the store, as `shardb init` and `shardb policy --keep-last 1` do."""
    with shardb.open(folder, create=True) as store:
        branching.set_policy(store, Policy(keep_last=COPIES - 1))


def model_of(arguments: argparse.Namespace) -> ModelConfig:
    """Give the geometry."""
    return new_model(dict(MODELS[arguments.model]), None)


def spare_sizes(model: ModelConfig) -> list[int]:
    """Give the sizes of all files that the store will hold, the largest first."""
    shards = shard_bytes(model, EngineOptions(optimizer_state_dtype=STATE))
    return sorted([*shards.values()] * COPIES, reverse=True)


def run_of(arguments: argparse.Namespace) -> tuple[Recipe, Settings]:
    """Give the run as `train` plans it on a GPU; nothing is asked of one."""
    facts = DataFacts(seq_len=arguments.seq_len, digest="", end_of_text_id=None)
    given = {**flags_of(arguments), "data_dir": "rows"}
    return new_run(given, facts, device="cuda:0", threads=1)


def predicted(arguments: argparse.Namespace) -> DeviceNeed:
    """Give what the pre-flight predicts for the device; nothing is asked of one."""
    recipe, settings = run_of(arguments)
    shape = step_shape(recipe, settings, settings.activations, settings.activation_placement)
    return device_need(shape, settings)


def need_text(need: DeviceNeed) -> str:
    """Tell a prediction to people."""
    return (
        f"the pre-flight predicts {in_bytes(need.step_bytes)} of device memory, fullest in"
        f" {need.fullest}, and with what the budget has room for ({need.kept} of {need.stages}"
        f" stages stay) {in_bytes(need.most_bytes)} at most"
    )


@dataclass(kw_only=True)
class Running:
    """A run of `train`, whose lines are told as they come."""

    words: Sequence[str]
    clock: Clock
    begun_seconds: dict[str, float] = field(default_factory=dict)

    def to_end(self) -> int:
        """Run it to its end, or to the limit; give the exit code."""
        process = subprocess.Popen(
            [sys.executable, "-m", *self.words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | ENVIRONMENT,
        )
        with suppress(OSError):  # where memory is not enough, this is what has to go
            Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000", encoding="ascii")
        reader = threading.Thread(target=self._read, args=(process,))
        reader.start()
        try:
            return process.wait(max(1.0, self.clock.left_seconds - STOP_SECONDS))
        except subprocess.TimeoutExpired:
            self.clock.say("the time is over: the run is asked to end with its step")
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                return process.wait(max(1.0, self.clock.left_seconds - STOP_SECONDS / 2))
            return -signal.SIGKILL
        except SystemExit:
            self.clock.say("asked to end: what has come is told")
            return TERMINATED
        finally:
            process.kill()
            process.wait()
            reader.join()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            for what in ("budgets hold", "begins, "):
                if what in line:
                    self.begun_seconds[what] = time.monotonic()
            self.clock.say(line.rstrip())

    @property
    def initialising_seconds(self) -> float | None:
        """Give the time from the pre-flight's end to when the first step may begin."""
        found = [self.begun_seconds.get(what) for what in ("budgets hold", "begins, ")]
        return None if None in found else found[1] - found[0]  # type: ignore[operator]


def summary(
    arguments: argparse.Namespace, lines: Sequence[dict[str, Any]], store: Path
) -> dict[str, Any]:
    """Give what the steps took; the rates are of steps that were neither compiled nor recorded."""
    steady = [line for line in lines if line["step"] >= STEADY_STEP] or [*lines[-1:]]
    seconds = statistics.median(line["seconds"] for line in steady)
    rates = json.loads((store / "logs" / FILE_NAME).read_text(encoding="utf-8"))
    matmul = next(iter(rates.values()))["matmul_flops_per_second"]
    tokens = tokens_per_step(arguments)
    count = parameter_count(model_of(arguments))
    budget = size_of(arguments.vram_budget, "--vram-budget")
    return {
        "parameters": count,
        "tokens_per_step": tokens,
        "seconds": {line["step"]: line["seconds"] for line in lines},
        "commit_seconds": {line["step"]: line["commit_seconds"] for line in lines},
        "loss": {line["step"]: line["loss"] for line in lines},
        "steady_steps": [line["step"] for line in steady],
        "step_seconds": seconds,
        "step_seconds_range": [f(line["seconds"] for line in steady) for f in (min, max)],
        "tokens_per_second": tokens / seconds,
        "matmul_flops_per_second": matmul,
        "ceiling_percent": 100 * step_flops(run_of(arguments)[0]) / matmul / seconds,
        "ceiling_percent_of_the_log": statistics.median(x["ceiling_percent"] for x in steady),
        "process_bytes": max(line["host_memory_bytes"] for line in lines),
        "device_peak_bytes": max(line["device_peak_bytes"] for line in lines),
        "resident_bytes": {k: b * count for k, b in RESIDENT_BYTES.items()},
        "largest_resident": {k: budget // b for k, b in RESIDENT_BYTES.items()},
    }


def summary_text(result: dict[str, Any]) -> str:
    """Tell the result to people."""
    low, high = result["step_seconds_range"]
    largest = result["largest_resident"]
    return (
        f"{result['parameters']:,} parameters, {result['tokens_per_step']:,} tokens a step, steps"
        f" {result['steady_steps']}: {result['step_seconds']:.2f} s ({low:.2f}-{high:.2f}),"
        f" {result['tokens_per_second']:,.0f} tokens/s, {result['ceiling_percent']:.1f} % of"
        f" {result['matmul_flops_per_second'] / 1e12:.0f} TFLOP/s\n"
        f"device: {in_bytes(result['device_peak_bytes'])} at most,"
        f" {in_bytes(result['predicted_step_bytes'])} predicted for a step and at most"
        f" {in_bytes(result['predicted_bytes'])} with what is spent of the budget;"
        f" {in_bytes(result['driver_bytes'])} by the driver\n"
        f"memory: {in_bytes(result['process_bytes'])} in the process, its store's files included;"
        f" {in_bytes(result['used_bytes'])} of the machine's {in_bytes(result['total_bytes'])} in"
        " use at most, by others too\n"
        f"resident training would take {in_bytes(result['resident_bytes']['fp32'])} for weights,"
        f" gradients and moments; in --vram-budget it could train {largest['fp32'] / 1e9:.2f} B"
        f" parameters ({largest['bf16'] / 1e9:.2f} B with bf16 moments), activations aside: by"
        " arithmetic, 16 (12) bytes a parameter"
    )


def measure(arguments: argparse.Namespace, clock: Clock, folder: Path) -> dict[str, Any]:
    """Make the store, run `train` on it, and give what came of it."""
    model, store = model_of(arguments), folder / "run"
    rows = (arguments.steps + 1) * arguments.micro_batch_size * arguments.accumulation
    write_rows(folder / "rows", model.vocab_size, arguments.seq_len, rows)
    new_store(store)
    words = train_words(arguments, folder)
    clock.say(f"memory of the machine: {_memory_text()}")
    until = time.monotonic() + WARM_SHARE * clock.limit_seconds
    with ThreadPoolExecutor(1) as executor:
        need = executor.submit(predicted, arguments)
        spare = SpareFiles(store, until)
        spare.make(spare_sizes(model), arguments.threads)
        why = f": {spare.problem}" if spare.problem else ""
        clock.say(f"{in_bytes(spare.made_bytes)} of files wait for the store{why}")
        clock.say(f"memory of the machine: {_memory_text()}")
        clock.say(need_text(need.result()))
    running = Running(words=words, clock=clock)
    with closing(Watch()) as watch:
        code = running.to_end()
    clock.say(f"train ended with exit code {code}")
    lines = step_lines(store)
    if not lines:
        return {"exit_code": code}
    total = memory_of_machine()[0]
    return summary(arguments, lines, store) | {
        "exit_code": code,
        "predicted_bytes": need.result().most_bytes,
        "predicted_step_bytes": need.result().step_bytes,
        "initialising_seconds": running.initialising_seconds,
        "driver_bytes": watch.device_most_bytes,
        "used_bytes": total - watch.available_least_bytes,
        "total_bytes": total,
        "timings": lines[-1]["timings"],
    }


def _memory_text() -> str:
    total, available = memory_of_machine()
    return f"{total / GIB:.1f} GiB, {available / GIB:.1f} available"


def arguments_of(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=MODELS, default="7B")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    parser.add_argument("--max-grad-norm", type=float, default=1000.0)
    parser.add_argument("--vram-budget", default="7.9GiB")
    parser.add_argument("--pinned-budget", default="118GiB")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ram-disk", type=Path, default=Path("/dev/shm"))
    parser.add_argument(
        "--mount-gib", type=int, default=0, help="mount a RAM disk of so many GiB in --ram-disk"
    )
    parser.add_argument("--threads", type=int, default=12, help="that make files beforehand")
    parser.add_argument("--limit-seconds", type=float, default=205.0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(words)


def _end(_number: int, _frame: object) -> None:
    raise SystemExit(TERMINATED)


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; the run's exit code where it made no step."""
    arguments = arguments_of(words)
    signal.signal(signal.SIGTERM, _end)
    clock = Clock(limit_seconds=arguments.limit_seconds)
    say: Callable[[str], None] = clock.say
    with ExitStack() as stack:
        folder = stack.enter_context(ram_disk(arguments.ram_disk, arguments.mount_gib, say))
        result = measure(arguments, clock, folder)
        if "step_seconds" in result:
            for text in summary_text(result).splitlines():
                say(text)
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    made_steps = "step_seconds" in result
    return 0 if made_steps else max(1, result["exit_code"])


if __name__ == "__main__":
    sys.exit(main())
