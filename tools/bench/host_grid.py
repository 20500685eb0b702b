"""Compare the predicted host memory of a step on a CPU with what steps take, over a grid of them.

Owns the grid, the two ways of measuring and the table. Each case runs in a process of its own, on a
store in memory, with the store's images made by the steps before the measured ones:

- tensors: the most bytes that PyTorch's CPU allocator had handed out at a time, by its own events.
  This is what is predicted.
- process: how far the resident set rose in a step above what it was before, from VmHWM, with the
  heap's free pages given back first. The C library's heap keeps holes, so it is more. It is told
  beside the prediction, for `trainer.budget` adds a share for it.

    python -m tools.bench.host_grid
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.memory_transaction import MemoryStore
from trainer.device import Device
from trainer.engine import Engine, EngineOptions
from trainer.host_memory import keep_freed_memory
from trainer.host_walk import predicted_host_bytes
from trainer.model.config import ModelConfig
from trainer.pipeline.pipeline import PipelineSettings
from trainer.sizes import in_bytes
from trainer.vram import StepShape

LIMIT_SECONDS = 600


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A case: what was predicted, and what two steps took."""

    name: str
    predicted: int
    tensors: int
    process: int

    @property
    def ratio(self) -> float:
        """Give predicted over measured tensors: below 1 is a prediction that was too low."""
        return self.predicted / self.tensors

    @property
    def heap_ratio(self) -> float:
        """Give what the process took over what its tensors took."""
        return self.process / self.tensors


def cases() -> Iterator[tuple[str, StepShape]]:
    """Give the grid: a base, each of its sides changed by itself, and a few changed together."""
    model = ModelConfig(
        vocab_size=4000,
        hidden_size=192,
        num_layers=5,
        num_heads=6,
        num_kv_heads=6,
        intermediate_size=512,
        max_position_embeddings=512,
    )
    base = StepShape(
        model=model, options=EngineOptions(), micro_batch_size=4, accumulation=1, seq_len=128
    )
    yield "base", base
    grouped = replace(model, num_kv_heads=2)
    models = {
        "2 layers": replace(model, num_layers=2),
        "16k words": replace(model, vocab_size=16000),
        "16k words, tied": replace(model, vocab_size=16000, tied_embeddings=True),
        "grouped": grouped,
        "qwen3-like": replace(grouped, qk_norm=True, attention_bias=True),
    }
    for name, changed in models.items():
        yield name, replace(base, model=changed)
    for rows in (1, 16):
        yield f"{rows} rows", replace(base, micro_batch_size=rows)
    for tokens in (32, 512):
        yield f"{tokens} tokens", replace(base, seq_len=tokens)
    for count in (2, 6):
        yield f"{count} micro-batches", replace(base, accumulation=count)
    changes: list[dict[str, Any]] = [
        {"optimizer": "lion"},
        {"optimizer": "adafactor"},
        {"optimizer_state_dtype": "int8"},
        {"master_weight_dtype": "bf16"},
        {"grad_clip_mode": "shard"},
        {"optimizer": "adafactor", "grad_clip_mode": "shard"},
        {"dtype": "bf16"},
        {"dtype": "fp16"},
        {"lm_head_chunk_tokens": 64},
        {"activations": "keep"},
    ]
    for change in changes:
        name = ", ".join(f"{field} {value}" for field, value in change.items())
        yield name, replace(base, options=replace(base.options, **change))
    many = replace(base, accumulation=6, micro_batch_size=8)
    small = {"grad_clip_mode": "shard", "lm_head_chunk_tokens": 64}
    for change in ({"activations": "keep"}, {"dtype": "bf16"}, small):
        name = ", ".join(f"{field} {value}" for field, value in change.items())
        yield f"6 x 8 rows, {name}", replace(many, options=replace(base.options, **change))


def tensor_peak(step: Any) -> int:
    """Give the most bytes that the allocator had handed out at a time during `step()`."""
    activity = torch.profiler.ProfilerActivity.CPU
    gc.collect()  # what was left before would be given back in between, and taken for the step's
    with torch.profiler.profile(activities=[activity], profile_memory=True) as profile:
        step()
    held = peak = 0
    assert profile.profiler is not None
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


class Steps:
    """Steps of a shape on random rows, in a store in memory; through a pipeline if one is given."""

    def __init__(self, shape: StepShape, pipeline: PipelineSettings | None = None) -> None:
        self._shape = shape
        self._engine = Engine(shape.model, shape.options, Device.from_name("cpu"))
        self._store = MemoryStore(poison=False)
        self._random = np.random.default_rng(0)
        self._done = 0
        txn = self._store.begin()
        self._engine.initialise(txn, 0)
        txn.commit()
        if pipeline is not None:
            self._engine.use_pipeline(pipeline)

    def __call__(self) -> None:
        """Train one step."""
        shape = self._shape
        width = (shape.micro_batch_size, shape.seq_len + 1)
        rows = [
            self._random.integers(0, shape.model.vocab_size, width)
            for _ in range(shape.accumulation)
        ]
        txn = self._store.begin()
        self._done += 1
        self._engine.train_step(txn, rows, step=self._done, learning_rate=1e-4)
        txn.commit()

    def close(self) -> None:
        """Let go of the pipeline."""
        self._engine.close()


def measured(shape: StepShape) -> tuple[int, int]:
    """Give the peaks of tensors and of the process; in a process of its own."""
    torch.set_num_threads(1)
    step = Steps(shape)
    step()
    step()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    step()
    process = _status_bytes("VmHWM") - before
    return tensor_peak(step), process


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"the kernel tells no {key}")


def _in_child(shape: StepShape, keeps: bool) -> tuple[int, int]:
    if keeps:
        keep_freed_memory()
    return measured(shape)


def main() -> int:
    """Print the table and one line that sums it up; 1 where a prediction was too low or 1 % off."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--keep-freed", action="store_true", help="as `train` sets the heap")
    given = parser.parse_args()
    started, found = time.monotonic(), []
    for name, shape in cases():
        if time.monotonic() - started > LIMIT_SECONDS:
            print(f"{name:<40} left out: {LIMIT_SECONDS} s are over")
            continue
        with multiprocessing.get_context("fork").Pool(1) as pool:
            tensors, process = pool.apply(_in_child, (shape, given.keep_freed))
        case = Measured(
            name=name, predicted=predicted_host_bytes(shape), tensors=tensors, process=process
        )
        found.append(case)
        print(
            f"{name:<48} {in_bytes(case.predicted):>10} {in_bytes(tensors):>10} {case.ratio:.4f}"
            f"  process {in_bytes(process):>10} {case.heap_ratio:.2f}",
            flush=True,
        )
    if given.json:
        given.json.write_text(json.dumps([asdict(case) for case in found], indent=1))
    ratios = [case.ratio for case in found]
    heaps = sorted(case.heap_ratio for case in found)
    bad = sum(not 1 <= ratio <= 1.01 for ratio in ratios)
    print(
        f"host_grid: {len(found)} cases, {bad} under or more than 1 % over; predicted/measured"
        f" {min(ratios):.4f} to {max(ratios):.4f}; process/tensors {heaps[0]:.2f} to"
        f" {heaps[-1]:.2f}, median {heaps[len(heaps) // 2]:.2f}; {time.monotonic() - started:.0f} s"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
