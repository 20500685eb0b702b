"""What a run will need, before anything is allocated: store, memory, and bytes written a step.

Owns the arithmetic and the comparison with the machine. Sizes of shards and of a step's tensors are
exact, what is around them is an estimate on the high side. Knows nothing of a run's progress. Each
budget is checked by itself and the message names it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from shardb.errors import StorageFullError
from shardb.filesystem import RealFileSystem
from shardb.layout import build
from shardb.retention import Policy
from trainer.errors import InputError
from trainer.host_memory import machine_memory
from trainer.host_updates import PENDING_MAX
from trainer.model.config import ModelConfig
from trainer.model.stages import build_stages, parameter_count
from trainer.optimizers.bf16_masters import stored_specs
from trainer.options import EngineOptions
from trainer.pipeline.choosing import pipeline_way
from trainer.recipe import Recipe, Settings
from trainer.recipe_options import options_of
from trainer.sizes import in_bytes
from trainer.step_memory import host_phases
from trainer.vram import StepShape

# The retained commits of a store where nothing was said, and the one in work.
COPIES = Policy().keep_last + 1
# Log, index pages and the reserve of a store, whatever the model's size.
STORE_OVERHEAD_BYTES = 32 << 20
# An empty store's log, index and reserve; then what one step adds to log and index together.
STORE_LEAST_BYTES = 2 << 20
RECORD_BYTES = 4096
RECORD_SHARD_BYTES = 512
# Python, torch and their libraries, measured at the first step of a tiny model: 302 MiB, and
# 665 MiB with a build of torch that has the libraries of CUDA, whether there is a GPU or not.
RUNTIME_BYTES = (800 if torch.version.cuda else 400) << 20
# Between tensors the C library's heap has holes: a process took up to 3.4 times what its tensors
# took over the grid of `tools/bench/host_grid.py`, and this is what is above them.
HEAP_HOLES = 2.5
# What is kept between the passes, where a flag says so; `auto` looks at what is free.
ASKED = ("keep", "attention")
TENSORS, HOLES = "a step's tensors", "holes in the heap between them"
# The store keeps up to so many bytes of what it wrote last in memory.
CACHE_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Bytes of everything: exact for the store, estimated for memory."""

    parameter_count: int
    shards: Mapping[str, int]
    snapshots: int
    memory: Mapping[str, int]
    activations: str = "recompute"
    activations_why: str = ""  # beside a frozen base
    kept_bytes: int = 0  # of memory, for what --activations asks for: without it, they are free
    active_copies: int = 0
    placement: str = "vram"
    placement_why: str = ""
    boundary_bytes: int = 0
    spill_bytes: int = 0
    overhead_bytes: int = STORE_OVERHEAD_BYTES  # log and index
    base_bytes: int = 0  # frozen shards: there is one copy, whatever is trained beside it
    copies_base: bool = False  # in memory, in the dtype that computes
    copies: int = COPIES  # of the trained shards in the store, without snapshots

    @property
    def commit_bytes(self) -> int:
        """All shards of one step: also what one step writes."""
        return sum(self.shards.values())

    @property
    def store_bytes(self) -> int:
        """The most that the store holds at a time."""
        trained_bytes = (self.copies + self.snapshots) * self.commit_bytes
        return trained_bytes + self.base_bytes + self.overhead_bytes

    @property
    def active_bytes(self) -> int:
        """The most that the active store holds at a time; 0 without one."""
        if not self.active_copies:
            return 0
        return self.active_copies * self.commit_bytes + self.base_bytes + self.overhead_bytes

    @property
    def memory_bytes(self) -> int:
        """The most memory that training needs at a time, estimated."""
        return sum(self.memory.values())


def budget_of(
    recipe: Recipe, settings: Settings, store: Path | None = None, *, copies: int = COPIES
) -> Budget:
    """Work out the budgets of a run; `store` tells whether it lies on a RAM disk.

    copies: of the trained shards that the store holds at a time, the one in work among them.
    """
    every, stop = settings.snapshot_every, settings.max_steps
    activations = _activations(recipe, settings)
    shards = shard_bytes(recipe.model, forms_of(recipe))
    without_disk = Budget(
        parameter_count=parameter_count(recipe.model),
        shards=shards,
        overhead_bytes=_overhead_bytes(stop, len(shards)),
        snapshots=(stop // every if every and stop else 0) + settings.snapshot_best,
        memory=_memory(recipe, settings, activations),
        activations=activations,
        kept_bytes=asked_bytes(settings, lambda kept: _memory(recipe, settings, kept)),
        active_copies=settings.active_copies if settings.active else 0,
        copies=copies,
    )
    return replace(without_disk, memory=with_ram_disk(without_disk, settings, store))


def asked_bytes(settings: Settings, memory: Callable[[str], Mapping[str, int]]) -> int:
    """Give what takes memory because --activations asked for it; memory: by what is kept."""
    if settings.activations not in ASKED:
        return 0
    kept, again = (sum(memory(way).values()) for way in (settings.activations, "recompute"))
    return max(0, kept - again)


def again_remedy(kept_bytes: float, needed_bytes: float, limit_bytes: float) -> str:
    """Name the flag that was asked for too much, where all would fit without it; else nothing."""
    without = needed_bytes - kept_bytes
    if not kept_bytes or without > limit_bytes:
        return ""
    return f"give --activations auto or recompute, which needs about {in_bytes(int(without))}, or "


def with_ram_disk(budget: Budget, settings: Settings, store: Path | None) -> dict[str, int]:
    """Count what lies on a RAM disk as memory; images are then the files themselves."""
    held_bytes = 0
    if store is not None and is_ram_disk(store):
        held_bytes += budget.store_bytes
    if settings.active is not None and is_ram_disk(Path(settings.active)):
        held_bytes += budget.active_bytes
    if not held_bytes:
        return dict(budget.memory)
    images = ("the next commit's shards", "the last commit's shards")
    parts = {name: size for name, size in budget.memory.items() if name not in images}
    return {**parts, "the RAM disk": held_bytes}


def is_ram_disk(path: Path) -> bool:
    """Say whether a folder is, or would be made, on a file system in memory."""
    return RealFileSystem().kind(str(existing_parent(path))).startswith("memory:")


def forms_of(recipe: Recipe) -> EngineOptions:
    """Give the options that decide how a recipe's shards are stored."""
    return EngineOptions(
        optimizer=recipe.optimizer,
        optimizer_state_dtype=recipe.optimizer_state_dtype,
        master_weight_dtype=recipe.master_weight_dtype,
    )


def shard_bytes(model: ModelConfig, forms: EngineOptions) -> dict[str, int]:
    """Give the exact size of every trained shard's object, in forward order."""
    return dict(_shard_bytes(model, forms))


@lru_cache(maxsize=8)  # asked for several times a start, of thousands of layers at the most
def _shard_bytes(model: ModelConfig, forms: EngineOptions) -> Mapping[str, int]:
    rule = forms.update_rule()
    sizes = {}
    for stage in build_stages(model):
        stored = stored_specs(stage.specs, forms.master_weight_dtype)
        sizes[f"params/{stage.name}"] = build(stored).size_bytes
        sizes[f"optim/{stage.name}"] = build(rule.state_specs(stage.specs)).size_bytes
    return sizes


def check_space(budget: Budget, store: Path) -> None:
    """Refuse a run that does not fit; StorageFullError names the file system and both sizes."""
    folder = existing_parent(store)
    free_bytes = _free_bytes(folder)
    held_bytes = _held_bytes(store)
    needed_bytes = budget.store_bytes + budget.spill_bytes
    if free_bytes + held_bytes < needed_bytes:
        pinned = f" and {budget.snapshots:,} snapshots" if budget.snapshots else ""
        spilled = f", {in_bytes(budget.spill_bytes)} for activations" if budget.spill_bytes else ""
        raise StorageFullError(
            f"{store}: the store needs {in_bytes(needed_bytes)} ({budget.copies} copies of"
            f" {in_bytes(budget.commit_bytes)}{pinned}, {in_bytes(budget.overhead_bytes)} for log"
            f" and index{spilled}), but {in_bytes(free_bytes)} are free on"
            f" {folder}"
            + (f" beside the {in_bytes(held_bytes)} it has" if held_bytes else "")
            + f": free some, {_ways_round(store, held_bytes)}",
            path=str(store),
        )


def _ways_round(store: Path, held_bytes: int) -> str:
    """What makes a run need less; a store that is there cannot become another model."""
    if not held_bytes:
        return "take another --store, raise --snapshot-every, or take a smaller model"
    return (
        "raise --snapshot-every, lower --max-steps, drop or pack snapshots (`shardb rm`, `shardb"
        f" gc`, `shardb pack`), or go on elsewhere: `shardb clone {store} NEW`"
    )


def _overhead_bytes(stop: int | None, shards: int) -> int:
    """What log and index of a run need at most, generously; a run without an end needs them all."""
    if stop is None:
        return STORE_OVERHEAD_BYTES
    grown_bytes = stop * (RECORD_BYTES + shards * RECORD_SHARD_BYTES)
    return min(STORE_OVERHEAD_BYTES, STORE_LEAST_BYTES + grown_bytes)


def check_active_space(budget: Budget, store: Path, active: Path) -> None:
    """Refuse a run whose active store does not fit, beside the durable one where they share."""
    folder = existing_parent(active)
    needed_bytes, room_bytes = budget.active_bytes, _free_bytes(folder) + _held_bytes(active)
    shared = ""
    if os.stat(folder).st_dev == os.stat(existing_parent(store)).st_dev:
        needed_bytes += budget.store_bytes
        room_bytes += _held_bytes(store)
        shared = f" and {in_bytes(budget.store_bytes)} for {store}, which is on it too"
    if room_bytes < needed_bytes:
        what = "RAM disk" if is_ram_disk(active) else "disk of the active store"
        raise StorageFullError(
            f"{active}: the {what} {folder} needs {in_bytes(budget.active_bytes)}"
            f" ({budget.active_copies} copies of {in_bytes(budget.commit_bytes)},"
            f" {in_bytes(budget.overhead_bytes)} for log and index){shared}, but has room for"
            f" {in_bytes(room_bytes)}: make it larger, lower --active-copies (2 is the least), or"
            " train without --active",
            path=str(active),
        )


def check_memory(budget: Budget) -> str | None:
    """Refuse a run that needs more memory than the machine has; warn when it is only in use."""
    total_bytes, available_bytes = machine_memory()
    largest = max(budget.memory, key=lambda part: budget.memory[part])
    says = (
        f"training needs about {in_bytes(budget.memory_bytes)} of memory, most of it for"
        f" {largest} ({in_bytes(budget.memory[largest])})"
    )
    if budget.memory_bytes > total_bytes:
        raise InputError(
            f"{says}; this machine has {in_bytes(total_bytes)}:"
            f" {again_remedy(budget.kept_bytes, budget.memory_bytes, total_bytes)}"
            "lower --micro-batch-size, --gradient-accumulation-steps or --lm-head-chunk-tokens, or"
            " take a smaller model"
            + (", or a store that is not in memory" if "the RAM disk" in budget.memory else "")
        )
    if budget.memory_bytes > available_bytes:
        return f"{says}; only {in_bytes(available_bytes)} are free now"
    return None


def _activations(recipe: Recipe, settings: Settings) -> str:
    """Choose `keep` where `auto` was given and all of it takes at most half of what is free."""
    if settings.activations == "attention":
        raise InputError(
            "--activations attention is for compiled blocks with adapters: give auto, keep or"
            " recompute"
        )
    if settings.activations != "auto":
        return settings.activations
    if settings.activation_placement == "spill" or settings.device_pipeline == "on":
        return "recompute"
    kept_bytes = sum(_memory(recipe, settings, "keep").values())
    fits = recipe.device == "cpu" and kept_bytes <= machine_memory()[1] // 2
    return "keep" if fits else "recompute"


def step_shape(
    recipe: Recipe, settings: Settings, activations: str, placement: str = "vram"
) -> StepShape:
    """Give what decides the memory of a recipe's step."""
    return StepShape(
        model=recipe.model,
        options=options_of(recipe, settings, activations, placement),
        micro_batch_size=recipe.micro_batch_size,
        accumulation=recipe.gradient_accumulation_steps,
        seq_len=recipe.seq_len,
    )


def step_memory(shape: StepShape, settings: Settings) -> dict[str, int]:
    """Give what a step on a CPU takes: its tensors to the byte, and room for the heap's holes."""
    tensors = max(host_phases(shape, settings).values())
    return {TENSORS: tensors, HOLES: int(HEAP_HOLES * tensors)}


def _memory(recipe: Recipe, settings: Settings, activations: str) -> dict[str, int]:
    """Give the parts; each is what a step holds at its fullest moment, or a little more."""
    sizes = shard_bytes(recipe.model, forms_of(recipe))
    commit_bytes = sum(sizes.values())
    stages = [name.removeprefix("params/") for name in sizes if name.startswith("params/")]
    largest = max(sizes[f"params/{name}"] + sizes[f"optim/{name}"] for name in stages)
    ahead = 0 if settings.prefetch_shards == "off" else settings.prefetch_window
    parts = {
        "the runtime": RUNTIME_BYTES,
        "one stage's shards, old and new": 2 * largest * _updated_at_once(recipe),
        "shards read ahead": min(ahead * max(sizes.values()), commit_bytes),
        "the next commit's shards": commit_bytes,
        "the last commit's shards": min(commit_bytes, CACHE_BYTES),
    }
    if recipe.device == "cpu":
        return parts | step_memory(step_shape(recipe, settings, activations), settings)
    gradients = [build(stage.specs).size_bytes for stage in build_stages(recipe.model)]
    waits = _clipped_from_host(recipe, settings, activations)
    waits = waits or recipe.optimizer_device in ("cpu", "split")
    waiting = sum(gradients) if waits else max(gradients)
    return parts | {"gradients": waiting}


def _clipped_from_host(recipe: Recipe, settings: Settings, activations: str) -> bool:
    """Say whether all gradients wait for the model's norm in host memory."""
    if recipe.grad_clip_mode != "global":
        return False
    way = pipeline_way(settings, options_of(recipe, settings, activations), is_host=False)
    return way is None or way.gradients == "host"


def _updated_at_once(recipe: Recipe) -> int:
    return 1 if recipe.optimizer_device in ("auto", "gpu") else 1 + PENDING_MAX


def existing_parent(path: Path) -> Path:
    """Give the nearest folder that is there: a path itself, or what is above it."""
    folder = path.absolute()
    while not folder.is_dir():
        folder = folder.parent
    return folder


def room_bytes(store: Path) -> int:
    """Give the bytes that a store may hold: what it holds now, and what is free beside it."""
    return _free_bytes(existing_parent(store)) + _held_bytes(store)


def _free_bytes(folder: Path) -> int:
    return RealFileSystem().space(str(folder)).free_bytes


def _held_bytes(store: Path) -> int:
    """Bytes of objects and spare files, which a resumed run reuses, and of its log and index."""
    held_bytes = 0
    for folder in (store / name for name in ("objects", "spare", "wal", "index")):
        for entry in os.scandir(folder) if folder.is_dir() else ():
            # A live writer renames files all the time; it is told of later, by the branch's lock.
            with suppress(FileNotFoundError):
                held_bytes += entry.stat().st_size
    return held_bytes
