"""How large a model, and how many rows, a device of 4 to 24 GiB trains: resident and streamed.

Owns the search: the device's memory is capped for this process, sizes grow until a step does not
fit, and the last that made its steps is told. Knows nothing of time. The cap counts what PyTorch's
allocator takes from the device, the holes in it included, not the half gigabyte that CUDA itself
needs. Rows: `perkunas-v2.9-100m`, 512 tokens a row, from a store in host memory. Models: blocks of
hidden size 2048, one row a step; the streamed one comes from a store on a RAM disk, as large as the
machine has room for.

    python -m tools.evidence_memory --out memory.jsonl --caps 4,24,8,12 --limit-seconds 120
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
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.memory_transaction import MemoryStore
from tests.support.resident import ResidentTrainer, optimizer_of
from tools.bench.gpu_product import Product
from tools.evidence_runs import available_bytes
from trainer.device import Device
from trainer.engine import Engine, EngineOptions
from trainer.model.config import ModelConfig
from trainer.model.presets import preset
from trainer.model.stages import Block, build_head, build_stages, build_trunk
from trainer.pipeline.pipeline import PipelineSettings

GIB = 1 << 30
SEQ_LEN = 512
# The second step has the optimizer's state, the third replays what was recorded.
STEPS = 3
ROWS_MAX = 2048
# 1.9 B parameters: more takes longer to begin than it tells.
BLOCKS_MAX = 36
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


class Whole(ResidentTrainer):
    """Resident training; its values are drawn on the device, for only their sizes matter here."""

    is_checkpointed = False

    def __init__(self, model: ModelConfig, device: str) -> None:
        self.config, self.options, self.device = model, OPTIONS, device
        self.dtype = torch.bfloat16
        self.trunk, self.head = build_trunk(model), build_head(model)
        self.params = {
            stage.name: {
                name: torch.empty(each.shape, device=device).normal_(0.0, 0.02).requires_grad_()
                for name, each in stage.parameters.items()
            }
            for stage in build_stages(model)
        }
        every = [p for shard in self.params.values() for p in shard.values()]
        self.optimizer = optimizer_of(OPTIONS, every)

    def _hidden(self, ids: Tensor) -> Tensor:
        x = ids
        for stage in self.trunk:
            if self.is_checkpointed and isinstance(stage, Block):
                x = checkpoint(self._run, stage, x, use_reentrant=False)
            else:
                x = self._run(stage, x)
        return x


class Checkpointed(Whole):
    """Resident training that keeps only what lies between the blocks."""

    is_checkpointed = True


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The device that is searched on, and when the search has to be over."""

    device: str
    ends_at: float
    rows_max: int = ROWS_MAX
    blocks_max: int = BLOCKS_MAX
    model: ModelConfig = field(default_factory=lambda: preset("perkunas-v2.9-100m"))
    block: ModelConfig = BLOCK

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


def new_store(model: ModelConfig) -> MemoryStore:
    """Make a store in host memory with the first values of a model."""
    store = MemoryStore(poison=False)
    txn = store.begin()
    Engine(model, STREAMED, Device.from_name("cpu")).initialise(txn, 1)
    txn.commit()
    return store


def resident_steps(trainer: Whole, rows: int) -> None:
    """Train a few steps with all of a model in the device's memory."""
    for _ in range(STEPS):
        trainer.step([_ids(trainer.config, rows)], 1e-4)


def streamed_steps(store: MemoryStore, model: ModelConfig, name: str, rows: int) -> None:
    """Train a few steps through the pipeline, from a store in host memory."""
    engine = Engine(model, STREAMED, Device.from_name(name))
    engine.use_pipeline(PipelineSettings(activations_on_host=True, gradients="recompute"))
    try:
        for step in range(1, STEPS + 1):
            txn = store.begin()
            engine.train_step(txn, [_ids(model, rows)], step=step, learning_rate=1e-4)
            txn.commit()
    finally:
        engine.close()


def _ids(model: ModelConfig, rows: int) -> Any:
    return np.random.default_rng(0).integers(0, model.vocab_size, (rows, SEQ_LEN + 1))


def largest(fits: Callable[[int], bool], first: int, limits: Limits) -> tuple[int, int]:
    """Give the largest size that fits and the smallest that does not, by doubling and halving.

    The second is 0 where nothing was too large. Ends within an eighth of the size.
    """
    good, bad, size, most = 0, 0, first, limits.rows_max
    while not limits.is_over() and size <= most and not bad:
        good, bad = (size, 0) if fits(size) else (good, size)
        size = min(2 * size, most) if size < most else most + 1
    while bad and bad - good > max(1, good // 8) and not limits.is_over():
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good, bad


def rows_found(cap: int, limits: Limits, store: MemoryStore) -> Iterator[dict[str, Any]]:
    """Give the most rows that a step of the 100 M model takes, in each way."""
    model, device = limits.model, Capped(limits.device, cap * GIB)

    def found(way: str, attempt: Callable[[int], None]) -> dict[str, Any]:
        good, bad = largest(partial(_fits, device, attempt), max(1, 2 * cap), limits)
        return {"kind": "rows", "cap_gib": cap, "way": way, "fits": good, "too_many": bad}

    yield found("streamed", partial(streamed_steps, store, model, limits.device))
    for kind in (Whole, Checkpointed):
        trainer = kind(model, limits.device)
        yield found(kind.__name__.lower(), partial(resident_steps, trainer))
        del trainer


def _fits(device: Capped, attempt: Callable[[int], None], size: int) -> bool:
    return device.tried(partial(attempt, size)) is not None


def blocks_found(cap: int, limits: Limits) -> dict[str, Any]:
    """Give the largest model that trains resident, checkpointed, with one row a step."""
    device = Capped(limits.device, cap * GIB)

    def attempt(blocks: int) -> None:
        resident_steps(Checkpointed(replace(limits.block, num_layers=blocks), limits.device), 1)

    # 16 bytes a parameter: weights, gradients and two moments.
    size = max(1, cap * GIB // 16 // block_parameters(limits.block) - 2)
    good, bad = 0, 0
    while not limits.is_over() and 0 < size <= limits.blocks_max and not (good and bad):
        if _fits(device, attempt, size):
            good, size = size, size + 1
        else:
            bad, size = size, size - 1
    return {
        "kind": "model",
        "cap_gib": cap,
        "way": "checkpointed",
        "blocks": good,
        "parameters": parameters_of(replace(limits.block, num_layers=good)) if good else 0,
        "too_many_blocks": bad,
    }


def streamed_model(cap: int, limits: Limits, folder: Path, data: Path) -> dict[str, Any]:
    """Train the largest model that the machine has room for, on a capped device; tell its steps."""
    room = min(shutil.disk_usage(folder).free, available_bytes()) * 0.8
    blocks = max(1, int(room / COPIES / STATE_BYTES / block_parameters(limits.block)) - 1)
    device = Capped(limits.device, cap * GIB)
    model = replace(limits.block, num_layers=min(blocks, limits.blocks_max))
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
        "parameters": parameters_of(model),
        "fits": peak is not None,
        "peak_bytes": peak,
        **told,
    }


def parameters_of(model: ModelConfig) -> int:
    """Count a model's parameters: blocks, their norms, embeddings, head and the last norm."""
    width = model.hidden_size
    return model.num_layers * block_parameters(model) + 2 * model.vocab_size * width + width


def block_parameters(model: ModelConfig) -> int:
    """Count the parameters of one block."""
    width = model.hidden_size
    return 4 * width * width + 3 * width * model.intermediate_size + 2 * width


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
    parser.add_argument("--caps", default="4,24,8,12")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="try the search, on tiny models")
    parser.add_argument("--limit-seconds", type=float, default=120)
    given = parser.parse_args(words)
    limits = Limits(device=given.device, ends_at=time.monotonic() + given.limit_seconds)
    if given.tiny:
        small = replace(
            BLOCK, hidden_size=32, num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=64
        )
        limits = replace(limits, rows_max=1, blocks_max=1, model=small, block=small)
    caps = [int(cap) for cap in given.caps.split(",")]
    with given.out.open("w", buffering=1) as out:

        def tell(line: dict[str, Any]) -> None:
            out.write(json.dumps(line) + "\n")

        store = new_store(limits.model)
        for number, cap in enumerate(caps):
            for line in rows_found(cap, limits, store):
                tell(line)
            tell(blocks_found(cap, limits))
            if number == 0:
                tell(streamed_model(cap, limits, given.memory, given.data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
