"""The runs of the exactness matrix: a recipe trained whole in memory, and streamed through stores.

Owns the flags of a cell and the two ways of carrying them out. `resident_trace` keeps everything in
memory under ordinary autograd, with its own loss scale and schedule; `streamed` goes through the
loop of the command `train` and its real stores. Knows nothing of how cells are chosen or of
processes. Invariant: what is recorded of a streamed step is read from the commit, not from memory
of how it was made; after the last one the stores are opened anew and read once more.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shardb
from shardb import Commit, Store
from tests.support.resident import ResidentStep, ResidentTrainer
from tools.exactness_cells import GEOMETRIES, SIZES, Cell, Reference, ways_of
from tools.exactness_trace import StepTrace, Trace, digests_of, unlike_tensors
from trainer.ceiling import Ceiling
from trainer.data.batches import batch_at
from trainer.data.rows import TokenRows
from trainer.device import Device
from trainer.found import find_run
from trainer.model.config import ModelConfig
from trainer.opening import Surroundings
from trainer.options import EngineOptions
from trainer.plan import make_plan
from trainer.progress import PlainProgress
from trainer.recipe_build import Given, check_given
from trainer.run import Run
from trainer.signals import StopRequest
from trainer.start import opened_run
from trainer.watchdog import Watchdog

STEPS = 20
SEED = 7
SEQ_LEN = 20
MICRO_BATCH = 3
ROWS = 96
PEAK_RATE = 3e-3
# A rate that differs from step to step for the first half of a run.
WARMUP_STEPS = 10
# Tight enough that clipping bites in most steps and not in all of them.
MAX_NORM = {"global": 1.4, "shard": 0.7, "none": 1.0}
CHUNK_TOKENS = 16
# So high that the first batches overflow, and growing so often that it overflows again.
FIRST_LOSS_SCALE = 2.0**24
GROWTH_STEPS = 4
DURABLE_EVERY = 5
COMPARED = ("params/", "optim/")

Sabotage = Callable[[Run], Any]


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where a run may write: a folder on a disk, one on a RAM disk, and the rows it reads."""

    disk: Path
    memory: Path
    data: Path

    def of_run(self, name: str) -> Places:
        """Give folders that no other run writes to."""
        return Places(disk=self.disk / name, memory=self.memory / name, data=self.data)

    def remove(self) -> None:
        """Remove what a run left; the rows stay."""
        for folder in (self.disk, self.memory):
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """A streamed run: its trace, the digests of every shard by step, faults of what it left."""

    trace: Trace
    shards: dict[int, dict[str, str]]
    pipeline_steps: int
    faults: list[str] = field(default_factory=list)


def write_data(folder: Path) -> Path:
    """Write rows of ids from a skewed draw, so that ids repeat, and give their folder."""
    draw = np.random.default_rng(SEED).random((ROWS, SEQ_LEN + 1))
    folder.mkdir(parents=True)
    np.save(folder / "rows.npy", (SIZES["vocab_size"] * draw**2).astype("<u2"))
    return folder


def given_of(cell: Cell, places: Places, device: str) -> dict[str, Any]:
    """Give the flags of a cell, by field."""
    tokens = MICRO_BATCH * cell.accumulation * SEQ_LEN
    given: dict[str, Any] = {
        **SIZES,
        **GEOMETRIES[cell.reference.geometry],
        "store": str(places.disk / "run"),
        "data_dir": str(places.data),
        "device": device,
        "threads": 1,
        "seed": SEED,
        "dtype": cell.dtype,
        "optimizer": cell.optimizer,
        "grad_clip_mode": cell.clip,
        "max_grad_norm": MAX_NORM[cell.clip],
        "weight_decay_scope": cell.reference.weight_decay_scope,
        "micro_batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": cell.accumulation,
        "learning_rate": PEAK_RATE,
        "warmup_tokens": WARMUP_STEPS * tokens,
        "lm_head_chunk_tokens": CHUNK_TOKENS,
        "loss_scale": FIRST_LOSS_SCALE,
        "loss_scale_growth_steps": GROWTH_STEPS,
        "prefetch_shards": cell.prefetch,
        "async_shard_writes": cell.writes == "async",
        "compile_blocks": False,
        "max_steps": STEPS,
        **ways_of(cell),
    }
    if cell.store == "active":
        given |= {"active": str(places.memory / "active"), "durable_every": DURABLE_EVERY}
    return given


def streamed(cell: Cell, places: Places, device: str, sabotage: Sabotage | None = None) -> Streamed:
    """Train a cell through its stores and take its trace; the stores are removed at the end."""
    given = given_of(cell, places, device)
    trace: list[StepTrace] = []
    try:
        with run_of(given) as run:
            if sabotage is not None:
                sabotage(run)
            run.keep_head()
            while not run.is_finished():
                if run.step() is not None:
                    trace.append(_committed(run))
            run.tiers.finish(run.head)
            pipeline_steps = run.engine.pipeline_steps
        shards = dict(committed_shards(stores_of(given)[0]))
        return Streamed(
            trace=trace,
            shards=shards,
            pipeline_steps=pipeline_steps,
            faults=unlike_heads(given, trace[-1]) + unlike_commits(given, shards),
        )
    finally:
        places.remove()


@contextmanager
def run_of(given: Given) -> Iterator[Run]:
    """Open what `train` opens for these flags, ready for its first step."""
    plan = make_plan(find_run(given), given, check_given(given))
    # So high that no step beats it: nothing is measured, and nothing kept.
    ceiling = Ceiling(matmul_flops_per_second=1e30, copy_bytes_per_second=1e30)
    with Watchdog(_say_nothing) as watchdog:
        around = Surroundings(note=_say_nothing, watchdog=watchdog, allow_network=False)
        with opened_run(plan, around, _Silent(), StopRequest(), ceiling=ceiling) as run:
            yield run


def resident_trace(reference: Reference, data: Path, device: str) -> Trace:
    """Train the same recipe with everything in memory; the reference of eight cells."""
    torch.set_num_threads(1)
    options = EngineOptions(
        seed=SEED,
        dtype=reference.dtype,
        optimizer=reference.optimizer,
        grad_clip_mode=reference.clip,
        max_grad_norm=MAX_NORM[reference.clip],
        lm_head_chunk_tokens=CHUNK_TOKENS,
        weight_decay=0.05,
        weight_decay_scope=reference.weight_decay_scope,
    )
    name = Device.from_name(device).name
    config = ModelConfig(**SIZES, **GEOMETRIES[reference.geometry])
    trainer = ResidentTrainer(config, options, SEED, name)
    rows = TokenRows.open(data, config.vocab_size)
    scale = _ResidentScale() if reference.dtype == "fp16" else None
    step_tokens = MICRO_BATCH * reference.accumulation * SEQ_LEN
    trace: list[StepTrace] = []
    batch = 0
    while len(trace) < STEPS:
        step, batch = len(trace) + 1, batch + 1
        rate = PEAK_RATE
        if step < WARMUP_STEPS:
            rate = PEAK_RATE * (step * step_tokens) / (WARMUP_STEPS * step_tokens)
        batches = _batches(rows, reference.accumulation, batch - 1)
        used = scale.value if scale else 1.0
        result = trainer.step(batches, rate, loss_scale=used)
        if scale is not None:
            scale.note(overflowed=result is None)
        if result is not None:
            arrays = digests_of(trainer.arrays())
            trace.append(_resident_step(step, batch, rate, used, result, arrays))
    return trace


def stores_of(given: Given) -> list[Path]:
    """Give the stores of a run, the one it is trained in first."""
    return [Path(given[field]) for field in ("active", "store") if field in given]


def committed_shards(store: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the digest of every shard of every commit in a store's log, each with its step."""
    with shardb.open(store) as opened:
        for record in opened.history():
            if record["kind"] == "commit":
                shards = {name: bytes(row[0]).hex() for name, row in record["shards"].items()}
                yield record["step"], shards


def unlike_commits(given: Given, expected: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Hold every commit in the logs of a run's stores to what its step must be."""
    found: list[str] = []
    for path in stores_of(given):
        steps = set()
        for step, shards in committed_shards(path):
            steps.add(step)
            found += unlike_tensors(step, shards, expected.get(step, {}))
        if path == stores_of(given)[0] and steps != set(expected):
            found.append(f"{path.name}: its log has {len(steps)} of {len(expected)} steps")
    return found


def unlike_heads(given: Given, last: StepTrace) -> list[str]:
    """Open every store anew: its head is the last step, with the bytes that were seen before."""
    found: list[str] = []
    for path in stores_of(given):
        with shardb.open(path) as store:
            head = store.resolve()
            found += unlike_tensors(head.step, _tensors(store, head), last.tensors)
        if head.step != last.step:
            found.append(f"{path.name}: opened anew it is at step {head.step}")
    return found


class _ResidentScale:
    """The loss scale as published: halved by an overflow, doubled after enough good steps."""

    def __init__(self) -> None:
        self.value = FIRST_LOSS_SCALE
        self._good = 0

    def note(self, *, overflowed: bool) -> None:
        self._good = 0 if overflowed else self._good + 1
        if overflowed:
            self.value *= 0.5
        elif self._good == GROWTH_STEPS:
            self.value, self._good = min(2.0 * self.value, FIRST_LOSS_SCALE), 0


class _Silent(PlainProgress):
    """Shows nothing: the tool that runs many runs tells of them itself."""

    def __init__(self) -> None:
        """Open nothing."""

    def note(self, text: str) -> None:
        """Say nothing."""

    def close(self) -> None:
        """Nothing was opened."""


def _say_nothing(_: str) -> None:
    """Take a note that nobody reads."""


def _batches(rows: TokenRows, accumulation: int, consumed: int) -> list[np.ndarray]:
    first = consumed * accumulation * MICRO_BATCH
    return [
        batch_at(rows, seed=SEED, position=first + i * MICRO_BATCH, batch_rows=MICRO_BATCH)
        for i in range(accumulation)
    ]


def _resident_step(
    step: int, batch: int, rate: float, scale: float, result: ResidentStep, tensors: dict[str, str]
) -> StepTrace:
    return StepTrace(
        step=step,
        batch=batch,
        learning_rate=rate,
        loss=result.loss,
        grad_norm=result.grad_norm,
        clip_scale=result.clip_scale,
        loss_scale=scale,
        shard_norms=result.shard_norms,
        tensors=tensors,
    )


def _committed(run: Run) -> StepTrace:
    """Take the trace of the newest commit from its store."""
    head, metrics = run.head, run.head.metrics
    return StepTrace(
        step=head.step,
        batch=head.state["position"] // run.plan.recipe.rows_per_step,
        learning_rate=metrics["learning_rate"],
        loss=metrics["loss"],
        grad_norm=metrics["grad_norm"],
        clip_scale=metrics["clip_scale"],
        loss_scale=metrics.get("loss_scale", 1.0),
        shard_norms={name: each["grad_norm"] for name, each in head.statistics.items()},
        tensors=_tensors(run.tiers.training, head),
    )


def _tensors(store: Store, commit: Commit) -> dict[str, str]:
    """Digest every parameter and moment of a commit."""
    return {
        f"{name}:{tensor}": digest
        for name, entry in commit.shards.items()
        if name.startswith(COMPARED)
        for tensor, digest in digests_of(store.read_object(name, entry).arrays()).items()
    }
