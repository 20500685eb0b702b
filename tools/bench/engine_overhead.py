"""A streamed training step against the same stages resident, interleaved.

Arms: resident training (ordinary autograd, everything in memory); the same with each block
checkpointed; the engine keeping activations; the engine recomputing them; and both through a real
store, commit included. Ratios are taken within a round, against the round's resident step, of
wall-clock time and of processor time; the median and the quartiles are printed.

Usage: python -m tools.bench.engine_overhead [--preset demo] [--rows 32] [--micro-batches 1]
       [--dtype fp32] [--rounds 15] [--dir /dev/shm] [--arms 'resident;store, keep'] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
CHECKPOINTED = "resident, checkpointed"
Step = Callable[[], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Took:
    """The seconds of a step: on the clock, and of all processors together."""

    wall: float
    cpu: float


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
    config: ModelConfig,
    options: EngineOptions,
    rows: Sequence[NDArray[np.integer]],
    folder: Path,
    wanted: tuple[str, ...],
) -> dict[str, Step]:
    """Make the arms whose names begin as wanted; give one step of each."""
    keep = replace(options, activations="keep")

    def resident(kind: type[ResidentTrainer]) -> Step:
        trainer = kind(config, options, SEED)
        return lambda: trainer.step(rows, LEARNING_RATE)

    def in_memory(chosen: EngineOptions) -> Step:
        training = MemoryTraining(config, chosen, poison=False)
        return lambda: training.step(rows)

    def in_store(chosen: EngineOptions) -> Step:
        training = StoreTraining(folder / chosen.activations, config, chosen)
        return lambda: training.step(rows)

    made: dict[str, Callable[[], Step]] = {
        "resident": partial(resident, ResidentTrainer),
        CHECKPOINTED: partial(resident, CheckpointedTrainer),
        "engine, keep": partial(in_memory, keep),
        "engine, recompute": partial(in_memory, options),
        "store, keep": partial(in_store, keep),
        "store, recompute": partial(in_store, options),
    }
    return {name: make() for name, make in made.items() if name.startswith(wanted)}


def measure(arms: dict[str, Step], rounds: int) -> dict[str, list[Took]]:
    """Time every arm once a round, after one round that is thrown away."""
    took: dict[str, list[Took]] = {name: [] for name in arms}
    for index in range(rounds + 1):
        # Each round begins elsewhere, so that no arm is always behind the same other.
        names = [*arms][index % len(arms) :] + [*arms][: index % len(arms)]
        for name in names:
            started, used = time.perf_counter(), time.process_time()
            arms[name]()
            took[name].append(
                Took(wall=time.perf_counter() - started, cpu=time.process_time() - used)
            )
    return {name: values[1:] for name, values in took.items()}


def base_of(name: str, arms: Collection[str]) -> str:
    """Name the resident arm: what computes blocks twice is held against what does so in memory."""
    return CHECKPOINTED if "recompute" in name and CHECKPOINTED in arms else "resident"


def summary_of(took: dict[str, list[Took]], tokens: int) -> dict[str, dict[str, float]]:
    """Give milliseconds, tokens a second and ratios to a resident arm of every arm.

    Ratios are taken within a round: of wall-clock time, and of processor time, which what else runs
    on the machine disturbs less.
    """
    found = {}
    for name, values in took.items():
        base = base_of(name, took)
        row = {
            "step_ms": statistics.median(each.wall for each in values) * 1e3,
            "cpu_ms": statistics.median(each.cpu for each in values) * 1e3,
            "tokens_per_second": tokens / statistics.median(each.wall for each in values),
        }
        for kind in ("wall", "cpu"):
            pairs = zip(values, took[base], strict=True)
            ratios = [getattr(mine, kind) / getattr(other, kind) for mine, other in pairs]
            low, middle, high = statistics.quantiles(ratios, n=4)
            row |= {f"{kind}_ratio": middle, f"{kind}_low": low, f"{kind}_high": high}
        found[name] = row
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
    parser.add_argument("--arms", default="", help="those whose names begin so, with ;")
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
        wanted = tuple(part for part in given.arms.split(";") if part) or ("",)
        arms = arms_of(config, options, rows, Path(folder), wanted)
        took = measure(arms, given.rounds)
    tokens = given.rows * given.positions * given.micro_batches
    found = summary_of(took, tokens)
    print(f"{given.preset}, {tokens} tokens a step in {given.micro_batches}, {given.dtype}")
    for name, row in found.items():
        ratios = ", ".join(
            f"{kind} {row[f'{kind}_ratio']:.3f} ({row[f'{kind}_low']:.3f} to"
            f" {row[f'{kind}_high']:.3f})"
            for kind in ("wall", "cpu")
        )
        print(
            f"  {name:24} {row['step_ms']:8.1f} ms {row['tokens_per_second']:8.0f} tokens/s "
            f" of {base_of(name, took)}: {ratios}"
        )
    if given.json:
        given.json.write_text(json.dumps({"arguments": vars(given), "arms": found}, default=str))


if __name__ == "__main__":
    main()
