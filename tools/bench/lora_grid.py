"""Compare the predicted memory of a step with adapters with what steps take on a CUDA device.

Owns the grid and the table: rows of 128 to 8,192 tokens, 1 to 16 of them, three vocabularies, both
forms of the base, and a few changes beside. Every case trains in a store in host memory, its last
step is measured, and all of it is given up before the next case.

    python -m tools.bench.lora_grid --json rows.json
    python -m tools.bench.lora_grid --device cpu --model tiny --limit-seconds 20
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from shardb import ShardView, torch_adaptor
from tests.support.memory_transaction import MemoryStore, MemoryTransaction
from tools.bench.vram_grid import Measured
from trainer.device import Device
from trainer.errors import InputError
from trainer.lora import nf4
from trainer.lora.adoption import fill_first
from trainer.lora.engine import AdapterEngine
from trainer.lora.walk import predicted_adapter_phases
from trainer.model import layers
from trainer.model.adapter_settings import ALL_LINEAR, LoraSettings
from trainer.model.config import ModelConfig
from trainer.model.stages import build_stages
from trainer.options import EngineOptions
from trainer.sizes import in_bytes
from trainer.vram import StepShape

STEPS = 3
ROWS = (1, 4, 16)
TOKENS = (128, 512, 2048, 8192)
VOCABULARIES = (8000, 32000, 128256)
CHUNK = 1024
SMALL = ModelConfig(
    vocab_size=8000,
    hidden_size=1024,
    num_layers=4,
    num_heads=16,
    num_kv_heads=4,
    intermediate_size=2816,
    max_position_embeddings=8192,
)
MODELS = {
    "small": SMALL,
    "tiny": replace(
        SMALL, hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2, intermediate_size=128
    ),
}
QV = LoraSettings(rank=16, alpha=32.0, targets=("q_proj", "v_proj"), base_quant="nf4")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step of one model."""

    name: str
    shape: StepShape
    lora: LoraSettings


def cases(model: ModelConfig) -> Iterator[Case]:
    """Give the grid, then a base with each of its sides changed by itself."""
    options = EngineOptions(dtype="bf16", lm_head_chunk_tokens=CHUNK)
    base = StepShape(model=model, options=options, micro_batch_size=4, accumulation=1, seq_len=512)
    for vocabulary in VOCABULARIES:
        worded = replace(model, vocab_size=vocabulary)
        for tokens in TOKENS:
            for rows in ROWS:
                shape = replace(base, model=worded, seq_len=tokens, micro_batch_size=rows)
                yield Case(name=f"{vocabulary:,} {rows} x {tokens}", shape=shape, lora=QV)
    wide = replace(model, vocab_size=VOCABULARIES[1])
    base = replace(base, model=wide)
    for name, lora in (
        ("all linear", replace(QV, targets=(ALL_LINEAR,))),
        ("rank 64", replace(QV, rank=64)),
        ("plain base", replace(QV, base_quant="none")),
    ):
        yield Case(name=name, shape=base, lora=lora)
    for count in (2, 4, 8):
        yield Case(name=f"{count} micro-batches", shape=replace(base, accumulation=count), lora=QV)
    for name, changed in (
        ("boundaries on the host", replace(options, activation_placement="host")),
        ("lion", replace(options, optimizer="lion")),
        ("tied", options),
    ):
        its_model = replace(wide, tied_embeddings=name == "tied")
        shape = replace(base, options=changed, model=its_model, accumulation=2)
        yield Case(name=name, shape=shape, lora=QV)


class Beside(MemoryTransaction):
    """A transaction beside frozen shards, which no commit stages again."""

    def __init__(self, store: MemoryStore, frozen: dict[str, ShardView]) -> None:
        super().__init__(store)
        self._frozen = frozen

    def read(self, name: str) -> ShardView:
        """See `MemoryTransaction`."""
        return self._frozen.get(name) or super().read(name)


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
            tensors = nf4.quantise(stage, tensors, engine.device.torch_device)
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


class Bases:
    """The base of one model at a time: cases that follow one another share it."""

    def __init__(self) -> None:
        self._key: tuple[ModelConfig, str] | None = None
        self._shards: dict[str, ShardView] = {}

    def of(self, model: ModelConfig, engine: AdapterEngine) -> dict[str, ShardView]:
        """Give a model's base."""
        key = (model, engine.lora.base_quant)
        if key != self._key:
            self._key, self._shards = key, frozen_shards(model, engine)
        return self._shards


def measured_bytes(case: Case, name: str, bases: Bases) -> int:
    """Train a few steps on a device and give the peak of the last ones, alone on it."""
    layers.rotary_angles.cache_clear()
    device = Device.from_name(name)
    shape = case.shape
    engine = AdapterEngine(shape.model, shape.options, device, case.lora)
    try:
        store, frozen = adapters_of(engine), bases.of(shape.model, engine)
        random = np.random.default_rng(0)
        width = (shape.micro_batch_size, shape.seq_len + 1)
        for step in range(1, STEPS + 1):
            if step <= 2:
                device.forget_peak()
            txn = Beside(store, frozen)
            rows = [
                random.integers(0, shape.model.vocab_size, width) for _ in range(shape.accumulation)
            ]
            engine.train_step(txn, rows, step=step, learning_rate=1e-4)
            txn.commit()
        return device.peak_bytes()
    finally:
        engine.close()
        del engine
        gc.collect()
        device.forget_peak()


def measured(case: Case, device: str | None, bases: Bases) -> Measured:
    """Measure a case and print its line."""
    is_host = device is not None and Device.from_name(device).is_host
    phases = predicted_adapter_phases(case.shape, case.lora, is_host=is_host)
    peak = None if device is None else measured_bytes(case, device, bases)
    fullest = max(phases, key=lambda phase: phases[phase])
    found = Measured(name=case.name, predicted=phases[fullest], peak=peak)
    ratio = "" if found.ratio is None else f"{found.ratio:.4f}"
    print(
        f"{found.name:<28} {in_bytes(found.predicted):>11} {in_bytes(peak or 0):>11}"
        f" {ratio:>7}  {found.predicted - (peak or 0):>14,} bytes  {fullest}",
        flush=True,
    )
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Print the table and one line that sums it up; 1 where a prediction was too low."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--predict-only", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", choices=sorted(MODELS), default="small")
    parser.add_argument("--limit-seconds", type=float, default=110)
    parser.add_argument("--json", type=Path, help="file for the rows")
    given = parser.parse_args(words)
    try:
        device = None if given.predict_only else Device.from_name(given.device).name
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    bases = Bases()
    began, found = time.monotonic(), []
    for case in cases(MODELS[given.model]):
        if time.monotonic() - began > given.limit_seconds:
            print(f"{case.name:<28} left out: {given.limit_seconds:.0f} s are over")
            continue
        found.append(measured(case, device, bases))
        if given.json:
            given.json.write_text(json.dumps([asdict(each) for each in found], indent=1))
    ratios = [each.ratio for each in found if each.ratio is not None]
    if ratios:
        under, over = sum(r < 1 for r in ratios), sum(r > 1.01 for r in ratios)
        print(
            f"lora_grid: {len(ratios)} cases, {under} under, {over} more than 1 % over;"
            f" predicted/measured from {min(ratios):.4f} to {max(ratios):.4f},"
            f" {time.monotonic() - began:.0f} s"
        )
    return int(any(ratio < 1 for ratio in ratios))


if __name__ == "__main__":
    sys.exit(main())
