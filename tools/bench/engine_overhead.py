"""A streamed training step against the same stages resident, interleaved.

Arms: resident training (ordinary autograd, everything in memory); the same with each block
checkpointed; the engine keeping activations; the engine recomputing them; and both through a real
store, commit included. Ratios are taken within a round, against the round's resident step; the
median and the spread are printed.

Usage: python -m tools.bench.engine_overhead [--preset demo] [--rows 32] [--micro-batches 1]
       [--dtype fp32] [--rounds 15] [--dir /dev/shm] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import shardb
from tests.support.memory_training import MemoryTraining
from tests.support.resident import ResidentTrainer
from trainer.device import Device
from trainer.engine import Engine, EngineOptions
from trainer.host_memory import keep_freed_memory
from trainer.model.config import ModelConfig
from trainer.model.presets import preset

LEARNING_RATE = 1e-3
SEED = 7
Step = Callable[[], object]


class CheckpointedTrainer(ResidentTrainer):
    """Resident, and each block's activations are computed twice."""

    def _hidden(self, ids: Tensor) -> Tensor:
        x = ids
        for stage in self.trunk:
            if stage.name.startswith("block"):
                x = checkpoint(self._run, stage, x, use_reentrant=False)
            else:
                x = self._run(stage, x)
        return x


class StoreTraining:
    """The engine over a real store; a step ends with its commit."""

    def __init__(self, folder: Path, config: ModelConfig, options: EngineOptions) -> None:
        self.engine = Engine(config, options, Device.from_name("cpu"))
        self.store = shardb.open(folder, create=True)
        self.steps_done = 0
        with self.store.begin() as txn:
            self.engine.initialise(txn, SEED)
            txn.commit(step=0)

    def step(self, rows: Sequence[NDArray[np.integer]]) -> None:
        self.steps_done += 1
        with self.store.begin() as txn:
            self.engine.train_step(txn, rows, step=self.steps_done, learning_rate=LEARNING_RATE)
            txn.commit(step=self.steps_done)


def arms_of(
    config: ModelConfig, options: EngineOptions, rows: Sequence[NDArray[np.integer]], folder: Path
) -> dict[str, Step]:
    """Give one step of every arm."""
    keep = replace(options, activations="keep")
    resident = ResidentTrainer(config, options, SEED)
    checkpointed = CheckpointedTrainer(config, options, SEED)
    in_memory = {
        "keep": MemoryTraining(config, keep, poison=False),
        "recompute": MemoryTraining(config, options, poison=False),
    }
    in_store = {
        "keep": StoreTraining(folder / "keep", config, keep),
        "recompute": StoreTraining(folder / "recompute", config, options),
    }
    return {
        "resident": lambda: resident.step(rows, LEARNING_RATE),
        "resident, checkpointed": lambda: checkpointed.step(rows, LEARNING_RATE),
        "engine, keep": lambda: in_memory["keep"].step(rows),
        "engine, recompute": lambda: in_memory["recompute"].step(rows),
        "store, keep": lambda: in_store["keep"].step(rows),
        "store, recompute": lambda: in_store["recompute"].step(rows),
    }


def measure(arms: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Time every arm once a round, after one round that is thrown away."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds + 1):
        for name, step in arms.items():
            started = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - started)
    return {name: values[1:] for name, values in seconds.items()}


def summary_of(seconds: dict[str, list[float]], tokens: int) -> dict[str, dict[str, float]]:
    """Give milliseconds, tokens a second and ratios to resident of every arm."""
    found = {}
    for name, values in seconds.items():
        ratios = [mine / base for mine, base in zip(values, seconds["resident"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        found[name] = {
            "step_ms": statistics.median(values) * 1e3,
            "tokens_per_second": tokens / statistics.median(values),
            "ratio": middle,
            "ratio_quartile_low": low,
            "ratio_quartile_high": high,
        }
    return found


def main() -> None:
    """Measure and print one line an arm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="demo")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--positions", type=int, default=128)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--grad-clip-mode", default="global")
    parser.add_argument("--lm-head-chunk-tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dir", default="/dev/shm")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    keep_freed_memory()
    config = preset(given.preset)
    options = EngineOptions(
        dtype=given.dtype,
        grad_clip_mode=given.grad_clip_mode,
        lm_head_chunk_tokens=given.lm_head_chunk_tokens,
    )
    draw = np.random.default_rng(1)
    shape = (given.rows, given.positions + 1)
    rows = [draw.integers(0, config.vocab_size, shape) for _ in range(given.micro_batches)]
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        arms = arms_of(config, options, rows, Path(folder))
        seconds = measure(arms, given.rounds)
    tokens = given.rows * given.positions * given.micro_batches
    found = summary_of(seconds, tokens)
    print(f"{given.preset}, {tokens} tokens a step in {given.micro_batches}, {given.dtype}")
    for name, row in found.items():
        print(
            f"  {name:24} {row['step_ms']:8.1f} ms {row['tokens_per_second']:8.0f} tokens/s  "
            f"{row['ratio']:.3f} of resident ({row['ratio_quartile_low']:.3f} to "
            f"{row['ratio_quartile_high']:.3f})"
        )
    if given.json:
        given.json.write_text(json.dumps({"arguments": vars(given), "arms": found}, default=str))


if __name__ == "__main__":
    main()
