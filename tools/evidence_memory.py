"""How large a model, and how many rows, a device of 4 to 24 GiB trains: resident and streamed.

Owns the search: the device's memory is capped for this process, sizes grow until a step does not
fit, and the last that made its steps is told. Knows nothing of time. The cap counts what PyTorch's
allocator takes from the device, the holes in it included, not the half gigabyte that CUDA itself
needs. Rows: `perkunas-v2.9-100m`, 512 tokens a row, from a store in host memory. Models: blocks of
hidden size 2048, one row a step; the streamed one comes from a store on a RAM disk, as large as the
machine has room for.

    python -m tools.evidence_memory --out memory.jsonl --caps 4,8,12,24 --limit-seconds 120
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.memory_transaction import MemoryStore
from tests.support.resident import ResidentTrainer
from tools.bench.gpu_product import Product
from tools.evidence_runs import available_bytes
from trainer.device import Device
from trainer.engine import Engine, EngineOptions
from trainer.model.config import ModelConfig
from trainer.model.presets import preset
from trainer.model.stages import Block
from trainer.pipeline.pipeline import PipelineSettings

GIB = 1 << 30
SEQ_LEN = 512
# The second step has the optimizer's state, the third replays what was recorded.
STEPS = 3
ROWS_MAX = 2048
OPTIONS = EngineOptions(dtype="bf16", lm_head_chunk_tokens=2048)
STREAMED = replace(OPTIONS, activation_placement="host")
STATE_BYTES = 12
# Of a streamed model: the copy that is read, the one that is written, and one of room.
COPIES = 3
BLOCK = ModelConfig(
    vocab_size=8000,
    hidden_size=2048,
    num_layers=1,
    num_heads=16,
    intermediate_size=5632,
    max_position_embeddings=2048,
)


class Checkpointed(ResidentTrainer):
    """Resident training that keeps only what lies between the blocks."""

    def _hidden(self, ids: Tensor) -> Tensor:
        x = ids
        for stage in self.trunk:
            if isinstance(stage, Block):
                x = checkpoint(self._run, stage, x, use_reentrant=False)
            else:
                x = self._run(stage, x)
        return x


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The device that is searched on, and when the search has to be over."""

    device: str
    ends_at: float
    rows_max: int = ROWS_MAX

    def is_over(self) -> bool:
        """Say whether no further size may be tried."""
        return time.monotonic() > self.ends_at


class Capped:
    """A device whose memory is capped for this process; on a processor nothing is."""

    def __init__(self, name: str, cap_bytes: int) -> None:
        self._device = Device.from_name(name)
        self._device.limit_memory(cap_bytes)

    def tried(self, attempt: Callable[[], None]) -> int | None:
        """Make an attempt and give the bytes tensors took at most, None where it did not fit."""
        self._forget()
        try:
            attempt()
            self._device.wait()
            return self._device.peak_bytes()
        except torch.OutOfMemoryError:
            return None
        finally:
            self._forget()

    def _forget(self) -> None:
        gc.collect()
        self._device.forget_peak()


def resident_steps(kind: type[ResidentTrainer], model: ModelConfig, rows: int, name: str) -> None:
    """Train a few steps with all of a model in the device's memory."""
    trainer = kind(model, OPTIONS, 1, name)
    for _ in range(STEPS):
        trainer.step([_ids(model, rows)], 1e-4)


def streamed_steps(model: ModelConfig, rows: int, name: str) -> None:
    """Train a few steps through the pipeline, from a store in host memory."""
    engine = Engine(model, STREAMED, Device.from_name(name))
    engine.use_pipeline(PipelineSettings(activations_on_host=True, gradients="recompute"))
    try:
        store = MemoryStore(poison=False)
        txn = store.begin()
        engine.initialise(txn, 1)
        txn.commit()
        for step in range(1, STEPS + 1):
            txn = store.begin()
            engine.train_step(txn, [_ids(model, rows)], step=step, learning_rate=1e-4)
            txn.commit()
    finally:
        engine.close()


def _ids(model: ModelConfig, rows: int) -> Any:
    return np.random.default_rng(0).integers(0, model.vocab_size, (rows, SEQ_LEN + 1))


def largest(fits: Callable[[int], bool], first: int, most: int, limits: Limits) -> tuple[int, int]:
    """Give the largest size that fits and the smallest that does not, by doubling and halving.

    The second is 0 where nothing was too large. Ends within an eighth of the size.
    """
    good, bad, size = 0, 0, first
    while not limits.is_over() and size <= most and not bad:
        good, bad = (size, 0) if fits(size) else (good, size)
        size = min(2 * size, most) if size < most else most + 1
    while bad and bad - good > max(1, good // 8) and not limits.is_over():
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good, bad


def rows_found(cap: int, limits: Limits) -> Iterator[dict[str, Any]]:
    """Give the most rows that a step of the 100 M model takes, in each way."""
    model = preset("perkunas-v2.9-100m")
    ways: dict[str, Callable[[int], None]] = {
        "streamed": partial(streamed_steps, model, name=limits.device),
        "resident": partial(resident_steps, ResidentTrainer, model, name=limits.device),
        "checkpointed": partial(resident_steps, Checkpointed, model, name=limits.device),
    }
    device = Capped(limits.device, cap * GIB)
    for way, attempt in ways.items():
        fits = partial(_fits, device, attempt)
        good, bad = largest(fits, max(1, 2 * cap), limits.rows_max, limits)
        yield {"kind": "rows", "cap_gib": cap, "way": way, "fits": good, "too_many": bad}


def _fits(device: Capped, attempt: Callable[[int], None], size: int) -> bool:
    return device.tried(partial(attempt, size)) is not None


def blocks_found(cap: int, limits: Limits) -> dict[str, Any]:
    """Give the largest model that trains resident and checkpointed, with one row a step."""
    device = Capped(limits.device, cap * GIB)

    def attempt(blocks: int) -> None:
        resident_steps(Checkpointed, replace(BLOCK, num_layers=blocks), 1, limits.device)

    # 16 bytes a parameter: weights, gradients and two moments.
    guess = max(1, cap * GIB // 16 // _block_parameters() - 2)
    good = 0
    bad = 0
    for blocks in range(guess, guess + 6):
        if limits.is_over():
            break
        if not _fits(device, attempt, blocks):
            bad = blocks
            break
        good = blocks
    return {
        "kind": "model",
        "cap_gib": cap,
        "way": "checkpointed",
        "blocks": good,
        "parameters": parameters_of(good),
        "too_many_blocks": bad,
    }


def streamed_model(cap: int, limits: Limits, folder: Path, data: Path) -> dict[str, Any]:
    """Train the largest model that the machine has room for, on a capped device; tell its steps."""
    room = min(shutil.disk_usage(folder).free, available_bytes()) * 0.8
    blocks = max(1, int(room / COPIES / STATE_BYTES / _block_parameters()) - 1)
    device = Capped(limits.device, cap * GIB)
    model = replace(BLOCK, num_layers=min(blocks, 96))
    told: dict[str, Any] = {}

    def attempt() -> None:
        with ExitStack() as stack:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
            began = time.monotonic()
            product = Product(stack, _given(model, place / "run", data, limits.device))
            told["begin_seconds"] = round(time.monotonic() - began, 1)
            for _ in range(STEPS):
                product.step()
            told["losses"] = [line["loss"] for line in product.lines]
            told["step_seconds"] = [round(line["seconds"], 2) for line in product.lines]

    peak = device.tried(attempt)
    return {
        "kind": "model",
        "cap_gib": cap,
        "way": "streamed",
        "blocks": model.num_layers,
        "parameters": parameters_of(model.num_layers),
        "fits": peak is not None,
        "peak_bytes": peak,
        **told,
    }


def parameters_of(blocks: int) -> int:
    """Count a model's parameters: blocks, their norms, embeddings, head and the last norm."""
    width = BLOCK.hidden_size
    return blocks * _block_parameters() + 2 * BLOCK.vocab_size * width + width


def _block_parameters() -> int:
    width = BLOCK.hidden_size
    return 4 * width * width + 3 * width * BLOCK.intermediate_size + 2 * width


def _given(model: ModelConfig, store: Path, data: Path, device: str) -> dict[str, Any]:
    sizes = {
        field: getattr(model, field)
        for field in (
            *("vocab_size", "hidden_size", "num_layers", "num_heads"),
            *("intermediate_size", "max_position_embeddings"),
        )
    }
    return {
        **sizes,
        "store": str(store),
        "data_dir": str(data / "train"),
        "device": device,
        "dtype": "bf16",
        "activations": "recompute",
        "activation_placement": "host",
        "gradient_placement": "recompute",
        "micro_batch_size": 1,
        "lm_head_chunk_tokens": 512,
        "learning_rate": 1e-4,
        "seed": 1,
    }


def main(words: Sequence[str] | None = None) -> int:
    """Search, the most telling first; every line is written as it is found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--caps", default="4,8,12,24")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows-max", type=int, default=ROWS_MAX)
    parser.add_argument("--limit-seconds", type=float, default=120)
    given = parser.parse_args(words)
    limits = Limits(
        device=given.device,
        ends_at=time.monotonic() + given.limit_seconds,
        rows_max=given.rows_max,
    )
    caps = [int(cap) for cap in given.caps.split(",")]
    with given.out.open("w", buffering=1) as out:

        def tell(line: dict[str, Any]) -> None:
            out.write(json.dumps(line) + "\n")

        for cap in caps:
            for line in rows_found(cap, limits):
                tell(line)
            tell(blocks_found(cap, limits))
        tell(streamed_model(caps[0], limits, given.memory, given.data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
