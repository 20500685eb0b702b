"""How large a model, and how many rows, a device of 4 to 24 GiB trains: resident and streamed.

Owns the search: the device's memory is capped for this process, and of two sizes an eighth apart
the one made its steps and the other did not fit. Knows nothing of time. The cap counts what
PyTorch's allocator takes from the device, the holes in it included, not the half gigabyte that CUDA
itself needs. Rows: `perkunas-v2.9-100m`, 512 tokens a row, blocks compiled in every way; the
streamed one through the pipeline, from a store in host memory. Models: blocks of hidden size 2048,
one row a step; the streamed one is a run of `train` whose store is on a RAM disk, as large as the
machine has room for. Invariant: host memory that others have is not counted as room.

    python -m tools.evidence_memory --out sizes.jsonl --data data --caps 4,24,8,12
    python -m tools.evidence_memory --out deep.jsonl --data data --deep --caps 4 --room-gib 64
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tools.bench.gpu_product import Product
from tools.bench.ram_room import memory_of_machine
from tools.evidence_steps import (
    PIPELINE,
    SEQ_LEN,
    STEPS,
    Capped,
    Checkpointed,
    Whole,
    new_store,
    resident_steps,
    streamed_options,
    streamed_steps,
)
from trainer.device import Device
from trainer.model.config import ModelConfig
from trainer.model.presets import preset
from trainer.model.stages import parameter_count
from trainer.options import EngineOptions
from trainer.pipeline.walk import predicted_pipeline_phases
from trainer.vram import StepShape

GIB = 1 << 30
ROWS_MAX = 1536
# 1.7 B parameters: more takes longer to begin than it tells.
BLOCKS_MAX = 32
OPTIONS = EngineOptions(dtype="bf16", lm_head_chunk_tokens=2048, compile_blocks=True)
RESIDENT = {"checkpointed": Checkpointed, "whole": Whole}
WAYS = ("streamed", *RESIDENT)
Attempt = Callable[[Device, int], None]
# A device where sizes are measured first, and how many rows.
ROOMY_GIB = 64
MEASURED = {"checkpointed": (64, 160), "whole": (8, 24)}
STATE_BYTES = 12
# Of a streamed model: the copy that is read, the one that is written, the one before.
COPIES = 3
# What a run takes of the host beside its store, and what is left to others.
SPARE_BYTES = 10 * GIB
BLOCK = ModelConfig(
    vocab_size=8000,
    hidden_size=2048,
    num_layers=1,
    num_heads=16,
    intermediate_size=5632,
    max_position_embeddings=2048,
)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The device that is searched on, and when the search has to be over."""

    device: str
    ends_at: float
    rows_max: int = ROWS_MAX
    blocks_max: int = BLOCKS_MAX
    room_bytes: int | None = None
    options: EngineOptions = OPTIONS
    model: ModelConfig = field(default_factory=lambda: preset("perkunas-v2.9-100m"))
    block: ModelConfig = BLOCK

    def is_over(self) -> bool:
        """Say whether no further size may be tried."""
        return time.monotonic() > self.ends_at


@dataclass(frozen=True, kw_only=True)
class Line:
    """The bytes that a step takes by its rows: a line through two sizes."""

    few: int
    few_bytes: int
    many: int
    many_bytes: int

    def rows_in(self, size_bytes: int) -> int:
        """Give the rows that the line has room for; 1 at least."""
        per_row = (self.many_bytes - self.few_bytes) / (self.many - self.few)
        if per_row <= 0:
            return self.many
        return max(1, int(self.many + (size_bytes - self.many_bytes) / per_row))


def largest(
    fits: Callable[[int], bool], guess: int, most: int, limits: Limits, *, parts: int = 8
) -> tuple[int, int]:
    """Give the largest size that fits and the smallest that does not, from a guess by eighths.

    parts: of a size, one of which is a step. Either size is 0 where none was found: nothing up to
    `most` was too large, or time was over.
    """
    good, bad, size = 0, 0, min(guess, most)
    while size and not limits.is_over() and not (good and bad):
        step = max(1, size // parts)
        if fits(size):
            good, size = size, (min(most, size + step) if size < most else 0)
        else:
            bad, size = size, size - step
    return good, bad


def streamed_line(limits: Limits) -> Line:
    """Give what the trainer itself predicts of streamed steps."""
    few, many = 64, 256
    shape = StepShape(
        model=limits.model,
        options=streamed_options(limits.options),
        micro_batch_size=1,
        accumulation=1,
        seq_len=SEQ_LEN,
    )

    def predicted(rows: int) -> int:
        sized = replace(shape, micro_batch_size=rows)
        return max(predicted_pipeline_phases(sized, PIPELINE, is_host=False).values())

    return Line(few=few, few_bytes=predicted(few), many=many, many_bytes=predicted(many))


class RowSearch:
    """The most rows of a step of the 100 M model in each way; what all caps need is made once."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._store = new_store(limits.model)
        self._lines: dict[str, Line] = {}

    def found(self, cap: int, way: str) -> dict[str, Any]:
        """Give the most rows that a step takes in one way, and the fewest that are too many."""
        limits = self._limits
        attempt: Attempt
        if way == "streamed":
            attempt = partial(streamed_steps, self._store, limits.model, limits.options)
        else:
            trainer = RESIDENT[way](limits.model, limits.options, limits.device)
            attempt = partial(resident_steps, trainer)
        guess = self._line(way, attempt).rows_in(cap * GIB)
        peaks: dict[int, int | None] = {}

        def fits(rows: int) -> bool:
            device = Capped(limits.device, cap * GIB)
            peaks[rows] = device.tried(partial(attempt, device.device, rows))
            return peaks[rows] is not None

        good, bad = largest(fits, guess, limits.rows_max, limits)
        told = {"fits": good, "too_many": bad, "peak_bytes": peaks.get(good), "tried": [*peaks]}
        return {"kind": "rows", "cap_gib": cap, "way": way, **told}

    def _line(self, way: str, attempt: Attempt) -> Line:
        if way not in self._lines:
            is_streamed = way == "streamed"
            limits = self._limits
            self._lines[way] = (
                streamed_line(limits) if is_streamed else measured_line(way, attempt, limits)
            )
        return self._lines[way]


def measured_line(way: str, attempt: Attempt, limits: Limits) -> Line:
    """Measure two sizes on a device that has room."""
    few, many = (min(rows, limits.rows_max + more) for more, rows in enumerate(MEASURED[way]))
    device = Capped(limits.device, ROOMY_GIB * GIB)
    sizes = [device.tried(partial(attempt, device.device, rows)) for rows in (few, many)]
    assert None not in sizes, f"{many} rows do not fit into {ROOMY_GIB} GiB"
    return Line(few=few, few_bytes=sizes[0] or 0, many=many, many_bytes=sizes[1] or 0)


def blocks_found(cap: int, limits: Limits) -> dict[str, Any]:
    """Give the largest model that trains resident, checkpointed, with one row a step."""
    device = Capped(limits.device, cap * GIB)
    options = replace(limits.options, compile_blocks=False)

    def attempt(blocks: int) -> None:
        model = replace(limits.block, num_layers=blocks)
        resident_steps(Checkpointed(model, options, limits.device), device.device, 1)

    def fits(blocks: int) -> bool:
        return device.tried(partial(attempt, blocks)) is not None

    # 16 bytes a parameter: weights, gradients and two moments.
    guess = max(1, cap * GIB // 16 // block_parameters(limits.block) - 1)
    most = limits.blocks_max
    good, bad = largest(fits, guess, most, limits, parts=most)  # block by block
    return {
        "kind": "model",
        "cap_gib": cap,
        "way": "checkpointed",
        "blocks": good,
        "parameters": parameter_count(replace(limits.block, num_layers=good)) if good else 0,
        "too_many_blocks": bad,
    }


def blocks_in(room_bytes: int, limits: Limits) -> int:
    """Give the blocks of a streamed model that the host has room for."""
    per_block = COPIES * STATE_BYTES * block_parameters(limits.block)
    return min(room_bytes // per_block - 1, limits.blocks_max)


def streamed_model(cap: int, limits: Limits, folder: Path, data: Path) -> dict[str, Any]:
    """Train the largest model that the machine has room for, on a capped device; tell its steps."""
    free = min(shutil.disk_usage(folder).free, memory_of_machine()[1] - SPARE_BYTES)
    room = free if limits.room_bytes is None else min(free, limits.room_bytes)
    told: dict[str, Any] = {"kind": "model", "cap_gib": cap, "way": "streamed", "room_bytes": room}
    blocks = blocks_in(room, limits)
    if blocks < 1:
        return {**told, "why": "the host has no room"}
    # If the host runs out of memory all the same, this process is to go and no other one.
    Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    model = replace(limits.block, num_layers=blocks)
    told |= {"blocks": blocks, "parameters": parameter_count(model)}
    device = Capped(limits.device, cap * GIB)

    def attempt() -> None:
        with ExitStack() as stack:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
            began = time.monotonic()
            product = Product(stack, _given(model, place / "run", data, limits.device))
            told["begin_seconds"] = round(time.monotonic() - began, 1)
            for _ in range(STEPS):
                if memory_of_machine()[1] < SPARE_BYTES or limits.is_over():
                    told["why"] = "no time was left" if limits.is_over() else "no memory was left"
                    break
                product.step()
                told["losses"] = [line["loss"] for line in product.lines]
                told["step_seconds"] = [round(line["seconds"], 2) for line in product.lines]
                told["peak_bytes"] = max(line["device_peak_bytes"] for line in product.lines)

    is_made = device.tried(attempt) is not None
    return {**told, "fits": is_made and "why" not in told}


def block_parameters(model: ModelConfig) -> int:
    """Count the parameters of one block."""
    one, two = (parameter_count(replace(model, num_layers=layers)) for layers in (1, 2))
    return two - one


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


def found_sizes(given: argparse.Namespace, limits: Limits) -> Iterator[Callable[[], Any]]:
    """Give what there is to find out, the most telling first."""
    caps = [int(cap) for cap in given.caps.split(",")]
    if given.deep:
        yield from (partial(streamed_model, c, limits, given.memory, given.data) for c in caps)
        return
    if not given.rows_alone:
        yield from (partial(blocks_found, cap, limits) for cap in caps)
    search = RowSearch(limits)
    ways = given.ways.split(",")
    if given.rows_alone:
        yield from (partial(search.found, cap, way) for way in ways for cap in caps)
        return
    yield from (partial(search.found, cap, way) for cap in caps for way in ways)


def main(words: Sequence[str] | None = None) -> int:
    """Search; every line is written as it is found. 1 where something could not be found out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--caps", default="4,24,8,12")
    parser.add_argument("--deep", action="store_true", help="train a deep streamed model alone")
    parser.add_argument("--rows-alone", action="store_true", help="search no models; way by way")
    parser.add_argument("--ways", default=",".join(WAYS), help="of training, in this order")
    parser.add_argument("--room-gib", type=int, help="host memory that a streamed model may take")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="try the search, on tiny models")
    parser.add_argument("--limit-seconds", type=float, default=120)
    given = parser.parse_args(words)
    limits = Limits(device=given.device, ends_at=time.monotonic() + given.limit_seconds)
    if given.room_gib:
        limits = replace(limits, room_bytes=given.room_gib * GIB)
    if given.tiny:
        limits = tiny(limits)
    failed = 0
    with given.out.open("w", buffering=1) as out:
        for find in found_sizes(given, limits):
            try:
                line = {"kind": "skipped", "why": "no time was left"}
                line = line if limits.is_over() else find()
            except Exception:  # noqa: BLE001 - what else can be found out is worth more
                line = {"kind": "failed", "why": traceback.format_exc(limit=4)}
                failed = 1
            out.write(json.dumps(line) + "\n")
    return failed


def tiny(limits: Limits) -> Limits:
    """Give limits that a processor can search in."""
    small = replace(
        BLOCK, hidden_size=32, num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=64
    )
    options = replace(OPTIONS, compile_blocks=False)
    return replace(limits, rows_max=1, blocks_max=1, model=small, block=small, options=options)


if __name__ == "__main__":
    sys.exit(main())
