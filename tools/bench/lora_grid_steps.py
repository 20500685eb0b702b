"""Steps with adapters whose memory is measured, phase by phase, in a store in host memory.

Owns the base, the adapters and the engine that cases of one model share, and the peaks of a step's
phases as the allocator of a CUDA device tells them. Knows nothing of the grid nor of predictions.
On a host the whole step has one peak, by the events of PyTorch's allocator.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from shardb import ShardView, torch_adaptor
from tests.support.memory_transaction import MemoryStore, MemoryTransaction
from tools.bench.host_grid import tensor_peak
from trainer.device import Device
from trainer.lora import nf4
from trainer.lora.adoption import fill_first
from trainer.lora.engine import AdapterEngine
from trainer.lora.feeding import Feed
from trainer.lora.residency import STEPS_SEEN
from trainer.lora.stages import AdaptedStage
from trainer.model import layers
from trainer.model.adapter_settings import LoraSettings
from trainer.model.config import ModelConfig
from trainer.model.stages import build_stages
from trainer.options import EngineOptions
from trainer.step_walk import kind_of
from trainer.vram import StepShape


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What cases have in common that share an engine."""

    model: ModelConfig
    options: EngineOptions
    lora: LoraSettings
    budget_bytes: int | None = None


@dataclass(kw_only=True)
class Peaks:
    """The most that tensors held, of all and by phase; requested: without the allocator's slack.

    seconds: of the step that was measured.
    """

    total: int = 0
    phases: dict[str, int] = field(default_factory=dict)
    requested: dict[str, int] = field(default_factory=dict)
    kept_blocks: int = 0
    seconds: float = 0.0


class Beside(MemoryTransaction):
    """A transaction beside frozen shards, which no commit stages again."""

    def __init__(self, store: MemoryStore, frozen: dict[str, ShardView]) -> None:
        super().__init__(store)
        self._frozen = frozen

    def read(self, name: str) -> ShardView:
        """See `MemoryTransaction`."""
        return self._frozen.get(name) or super().read(name)


class PhasePeaks:
    """Looks at a CUDA device's allocator whenever a step goes from one stage to the next."""

    def __init__(self, engine: AdapterEngine, peaks: Peaks) -> None:
        self._device = engine.device
        self._visits = len(engine.adapted.gradient_order())
        self._head = engine.adapted.head
        self._peaks = peaks
        self._phase = ""
        self._seen = 0
        self._is_back = False

    def switch(self, phase: str) -> None:
        """End a phase and begin another."""
        allocated, requested = self._device.take_peak()
        _raise(self._peaks.phases, self._phase, allocated)
        _raise(self._peaks.requested, self._phase, requested)
        self._phase = phase

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Have a step watched."""
        plain = Feed.visit

        @contextmanager
        def visit(feed: Feed, stage: AdaptedStage) -> Iterator[None]:
            self.switch(self._name(stage))
            with plain(feed, stage):
                yield
            self._seen += 1
            self.switch("update" if self._seen == self._visits else "between")

        with patch.object(Feed, "visit", visit):
            yield
            self.switch("end")

    def _name(self, stage: AdaptedStage) -> str:
        if stage is self._head:
            self._is_back = True
            return "head"
        return f"{'backward' if self._is_back else 'forward'} {kind_of(stage)}"


class Trained:
    """The engine of one kind of cases at a time, and the base of one model."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._base: tuple[tuple[ModelConfig, str], dict[str, ShardView]] | None = None
        self._kind: Kind | None = None
        self._engine: AdapterEngine | None = None
        self._store = MemoryStore(poison=False)
        self._random = np.random.default_rng(0)
        self._next: list[NDArray[np.integer]] = []

    def peaks(self, kind: Kind, shape: StepShape) -> Peaks:
        """Train a step that makes what lasts, and measure one behind it."""
        self.open(kind)
        peaks, device = Peaks(), self._device
        lasts_later = kind.budget_bytes is not None or kind.options.compile_blocks
        for _ in range(STEPS_SEEN + 1 if lasts_later else 1):
            self.step(shape)
        if device.is_host:
            peaks.total = tensor_peak(partial(self.step, shape))
            return peaks
        device.forget_peak()
        began = time.perf_counter()
        with PhasePeaks(self.engine, peaks).watching():
            self.step(shape)
        peaks.seconds = time.perf_counter() - began
        peaks.total = device.peak_bytes()
        base = self.engine.adapted.base
        peaks.kept_blocks = 0 if base is None else len(base.resident_names)
        return peaks

    def close(self) -> None:
        """Give the engine up, and what its compiled functions are known by."""
        if self._engine is not None:
            self._engine.close()
        self._engine = self._kind = None
        self._device.captured_bytes = 0
        torch.compiler.reset()
        gc.collect()
        self._device.drop_workspaces()  # a run has none of another one's threads and streams
        self._device.forget_peak()

    @property
    def engine(self) -> AdapterEngine:
        """Give what was opened last."""
        assert self._engine is not None
        return self._engine

    def step(self, shape: StepShape) -> None:
        """Train a step on random rows."""
        assert self._base is not None
        txn = Beside(self._store, self._base[1])
        rows, self._next = self._next or self._drawn(shape), self._drawn(shape)
        self.engine.train_step(txn, rows, step=1, learning_rate=1e-4, next_rows=lambda: self._next)
        txn.commit()

    def _drawn(self, shape: StepShape) -> list[NDArray[np.integer]]:
        size = shape.micro_batch_size, shape.seq_len + 1
        vocabulary = shape.model.vocab_size
        return [self._random.integers(0, vocabulary, size) for _ in range(shape.accumulation)]

    def open(self, kind: Kind) -> None:
        """Have an engine without a trace of other shapes; a compiled one serves one case."""
        self._next = []
        layers.rotary_angles.cache_clear()
        if kind != self._kind or kind.options.compile_blocks or kind.budget_bytes:
            self.close()
            self._engine = AdapterEngine(
                kind.model,
                kind.options,
                self._device,
                kind.lora,
                vram_budget_bytes=kind.budget_bytes,
            )
            self._kind, self._store = kind, adapters_of(self._engine)
            key = kind.model, kind.lora.base_quant
            if self._base is None or self._base[0] != key:
                self._base = key, frozen_shards(kind.model, self._engine)
        self._device.forget_peak()


def _raise(found: dict[str, int], phase: str, peak: int) -> None:
    found[phase] = max(found.get(phase, 0), peak)


def frozen_shards(model: ModelConfig, engine: AdapterEngine) -> dict[str, ShardView]:
    """Give a base, in the form that the engine takes."""
    txn = MemoryStore(poison=False).begin()
    found = {}
    place = engine.device.torch_device
    generator = torch.Generator(place).manual_seed(0)
    for stage in build_stages(model):
        tensors = {
            name: (0.02 * torch.randn(p.shape, generator=generator, device=place)).bfloat16()
            for name, p in stage.parameters.items()
        }
        kind = "params"
        if stage.name.startswith("block_") and engine.lora.base_quant == "nf4":
            kind = "nf4"
            tensors = nf4.quantise(stage, tensors, place)
        name = f"{kind}/{stage.name}"
        _write(txn, name, tensors)
        view = txn.read(name)
        found[name] = ShardView(name, view.layout, view.image, name)
    return found


def adapters_of(engine: AdapterEngine) -> MemoryStore:
    """Give a store in host memory with adapters alone."""
    store = MemoryStore(poison=False)
    txn = store.begin()
    for owner in engine.adapted.owners:
        specs = engine.shard_specs()
        view = txn.stage(f"adapters/{owner.name}", like=specs[f"adapters/{owner.name}"])
        fill_first(owner, 0, torch_adaptor.tensors(view))
        view.seal()
        state = txn.stage(f"optim/{owner.name}", like=specs[f"optim/{owner.name}"])
        for tensor in torch_adaptor.tensors(state).values():
            tensor.zero_()
        state.seal()
    txn.commit()
    return store


def _write(txn: MemoryTransaction, name: str, tensors: dict[str, torch.Tensor]) -> None:
    staged = txn.stage(name, like=torch_adaptor.specs(tensors))
    for key, target in torch_adaptor.tensors(staged).items():
        target.copy_(tensors[key])
    staged.seal()
