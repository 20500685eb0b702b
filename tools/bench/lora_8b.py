"""Adapters beside an 8 B base in four bits, through the whole product, on a GPU.

Makes a store that holds an import of Llama-3.1-8B's geometry, with random weights and the blocks
packed, and trains on it as `train --lora-rank` does: data loader, device, one commit a step. Each
case is a branch of its own. Its tokens/s are set beside the rates of matrix products measured
before and after it (large ones, and a block's own), its peak beside what pre-flight foretells.

Arithmetic counted: 6 operations a token and weight of the blocks (forward, again for the backward
pass, and the gradient of the input), 4 of the head; attention and the look-up are left out.

    python -m tools.bench.lora_8b --root /dev/shm --json rows.json
    python -m tools.bench.lora_8b --root /dev/shm --cases 2048:4:4:512:compiled,512:4:8:512:4GiB
    python -m tools.bench.lora_8b --model tiny --device cpu --cases 32:2:2:32 --steps 1
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shardb
from shardb import torch_adaptor
from tools.bench.gpu_product import Product
from trainer.budget import step_shape
from trainer.ceiling import measure
from trainer.device import Device
from trainer.lora import nf4
from trainer.lora.engine import AdapterEngine
from trainer.lora.walk import predicted_adapter_phases
from trainer.model import layers
from trainer.model.config import ModelConfig
from trainer.model.stages import Stage, build_stages
from trainer.model.stored import write_model
from trainer.sizes import in_bytes

LLAMA_8B = ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    intermediate_size=14336,
    max_position_embeddings=131072,
    rope_theta=500000.0,
    rope_scaling_type="llama3",
    rope_scaling_factor=8.0,
    rope_scaling_low_freq_factor=1.0,
    rope_scaling_high_freq_factor=4.0,
    rope_scaling_original_max_position_embeddings=8192,
)
MODELS = {
    "8b": LLAMA_8B,
    "tiny": replace(
        LLAMA_8B,
        vocab_size=512,
        hidden_size=128,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=256,
    ),
}
CASES = "512:4:8:512:compiled,2048:1:8:512:compiled,2048:4:4:512:compiled,2048:4:4:512"
ACTIVATIONS = ("recompute", "attention", "keep")
IDS_MAX = 32000
MATCHED_SECONDS, ROUNDS_AT_ONCE = 0.4, 8
WARM_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """Tokens of a row, rows of a micro-batch, micro-batches, tokens whose logits exist at once."""

    seq_len: int
    rows: int
    accumulation: int
    chunk: int
    vram_budget: str | None
    compiled: bool
    activations: str = "auto"

    @classmethod
    def of(cls, text: str) -> Case:
        """Read `SEQ:ROWS:MICRO-BATCHES:CHUNK[:VRAM-BUDGET][:compiled][:ACTIVATIONS]`."""
        seq_len, rows, accumulation, chunk, *more = text.split(":")
        kept = [word for word in more if word in ACTIVATIONS]
        budgets = [word for word in more if word not in ("compiled", *ACTIVATIONS)]
        return cls(
            seq_len=int(seq_len),
            rows=int(rows),
            accumulation=int(accumulation),
            chunk=int(chunk),
            vram_budget=budgets[0] if budgets else None,
            compiled="compiled" in more,
            activations=kept[0] if kept else "auto",
        )

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.seq_len * self.rows * self.accumulation


def make_store(path: Path, model: ModelConfig, device: Device) -> None:
    """Commit an import whose blocks are there in four bits alone; the rest is bf16."""
    generator = torch.Generator(device.torch_device).manual_seed(0)
    with shardb.open(path, create=True) as store, store.begin() as txn:
        write_model(txn, model)
        for stage in build_stages(model):
            tensors = _drawn(stage, generator, device)
            if stage.name.startswith("block_"):
                packed = nf4.quantise(stage, tensors, device.torch_device)
                host = {name: tensor.cpu() for name, tensor in packed.items()}
                torch_adaptor.write(txn, f"nf4/{stage.name}", host, trainable=False)
            else:
                host = {name: tensor.cpu() for name, tensor in tensors.items()}
                torch_adaptor.write(txn, f"params/{stage.name}", host, trainable=False)
        commit = txn.commit(step=0, state={}, metrics={})
        store.create_snapshot("imported", commit.id)


def _drawn(stage: Stage, generator: torch.Generator, device: Device) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in stage.parameters.items():
        values = torch.randn(
            parameter.shape,
            generator=generator,
            device=device.torch_device,
            dtype=torch.bfloat16,
        )
        wide = len(parameter.shape) > 1
        found[name] = values * parameter.shape[1] ** -0.5 if wide else torch.ones_like(values)
    return found


def make_rows(folder: Path, model: ModelConfig) -> None:
    """Write random ids."""
    folder.mkdir()
    random = np.random.default_rng(0)
    ids = random.integers(0, min(model.vocab_size, IDS_MAX), 1 << 22, dtype=np.uint16)
    ids.tofile(folder / "rows.bin")


def case_flops(model: ModelConfig) -> float:
    """Give the operations that a token takes."""
    head = model.vocab_size * model.hidden_size
    blocks = sum(
        parameter.shape[0] * parameter.shape[1]
        for stage in build_stages(model)
        if stage.name.startswith("block_")
        for parameter in stage.parameters.values()
        if len(parameter.shape) > 1
    )
    return 6.0 * blocks + 4.0 * head


def matched_rate(model: ModelConfig, tokens: int, device: Device) -> float:
    """Give the operations a second of a block's own products, on drawn values, kept up a while.

    Products of ones take less power than others, and so run at a higher clock.
    """
    block = next(stage for stage in build_stages(model) if stage.name.startswith("block_"))
    generator = torch.Generator(device.torch_device).manual_seed(1)
    weights = [w for w in _drawn(block, generator, device).values() if w.dim() > 1]
    rows = {
        width: torch.randn(
            tokens, width, generator=generator, device=device.torch_device, dtype=torch.bfloat16
        )
        for width in {weight.shape[1] for weight in weights}
    }
    flops = sum(2.0 * tokens * weight.numel() for weight in weights)
    device.wait()
    began, rounds = time.perf_counter(), 0
    while time.perf_counter() - began < MATCHED_SECONDS:
        for _ in range(ROUNDS_AT_ONCE):
            for weight in weights:
                torch.mm(rows[weight.shape[1]], weight.t())
        device.wait()
        rounds += ROUNDS_AT_ONCE
    return flops * rounds / (time.perf_counter() - began)


def given_of(arguments: argparse.Namespace, root: Path, index: int, case: Case) -> dict[str, Any]:
    """Give the flags of a case's run."""
    return {
        "store": str(root / "store"),
        "branch": f"case-{index}",
        "from_ref": "imported",
        "data_dir": str(root / "rows"),
        "data_dtype": "uint16",
        "seq_len": case.seq_len,
        "device": arguments.device,
        "dtype": "bf16",
        "lora_rank": arguments.rank,
        "lora_alpha": 32.0,
        "lora_targets": arguments.targets,
        "base_quant": "nf4",
        "micro_batch_size": case.rows,
        "gradient_accumulation_steps": case.accumulation,
        "lm_head_chunk_tokens": case.chunk,
        "activation_placement": arguments.activation_placement,
        "activations": case.activations,
        "compile_blocks": case.compiled,
        "learning_rate": 1e-4,
        "warmup_tokens": 100_000,
        "validate_every": 0,
        "seed": 3,
    } | ({"vram_budget": case.vram_budget} if case.vram_budget else {})


def measured(arguments: argparse.Namespace, root: Path, index: int, case: Case) -> dict[str, Any]:
    """Train a case's steps; give its row."""
    device = Device.from_name(arguments.device)
    before = measure(torch.bfloat16, device).matmul_flops_per_second
    tokens = case.seq_len * case.rows
    matched = [matched_rate(arguments.geometry, tokens, device)]
    layers.rotary_angles.cache_clear()  # tables of the case before are not this one's
    with ExitStack() as stack:
        began = time.perf_counter()
        product = Product(stack, given_of(arguments, root, index, case))
        shape = step_shape(
            product.plan.recipe,
            product.plan.settings,
            product.plan.budget.activations,
            product.plan.budget.placement,
        )
        for _ in range(WARM_STEPS):
            product.step()
        device = product.run.engine.device
        made = time.perf_counter() - began
        device.wait()
        device.forget_peak()
        seconds = []
        for _ in range(arguments.steps):
            began = time.perf_counter()
            product.step()
            seconds.append(time.perf_counter() - began)
        lines = product.lines[-arguments.steps :]
        if arguments.profile and not index:
            arguments.profile.write_text(kernels_of(product))
        lora = product.plan.recipe.lora
        assert lora is not None
        phases = predicted_adapter_phases(shape, lora, is_host=device.is_host)
        engine = product.run.engine
        assert isinstance(engine, AdapterEngine)
        base = engine.adapted.base
        row = {
            "case": asdict(case),
            "compiled": product.plan.recipe.compile_blocks,
            "activations": product.plan.budget.activations,
            "made_seconds": made,
            "seconds": seconds,
            "commit_seconds": statistics.median(line["commit_seconds"] for line in lines),
            "timings": lines[-1]["timings"],
            "loss": lines[-1]["loss"],
            "peak": device.peak_bytes(),
            "predicted": max(phases.values()),
            "phases": phases,
            "residents": len(base.resident_names) if base else 0,
            "page_locked": device.page_locks.locked_bytes,
        }
    after = measure(torch.bfloat16, device).matmul_flops_per_second
    matched.append(matched_rate(arguments.geometry, tokens, device))
    rate = case.tokens / statistics.median(seconds)
    done = 100 * rate * case_flops(arguments.geometry)
    return row | {
        "ceiling": [before, after],
        "matched": matched,
        "tokens_per_second": rate,
        "percent": done / statistics.mean([before, after]),
        "percent_matched": done / statistics.mean(matched),
    }


def kernels_of(product: Product) -> str:
    """Give the kernels of a step, those that take longest first."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        product.step()
    found = profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=60)
    return str(found)


def line_of(row: dict[str, Any]) -> str:
    """Give a row for people."""
    case = row["case"]
    peak = row["peak"] or 1
    return (
        f"{case['seq_len']:>5} x {case['rows']:<2} x {case['accumulation']:<3}"
        f" chunk {case['chunk']}"
        f" {case['vram_budget'] or '':<6} {row['tokens_per_second']:>9,.0f} tokens/s"
        f" {row['percent']:5.1f} % of {row['ceiling'][0] / 1e12:.0f}/{row['ceiling'][1] / 1e12:.0f}"
        f" TFLOP/s, {row['percent_matched']:.1f} % of {row['matched'][0] / 1e12:.0f}"
        f"/{row['matched'][1] / 1e12:.0f} at its own shapes;"
        f" {statistics.median(row['seconds']):.3f} s a step"
        f" ({min(row['seconds']):.3f}..{max(row['seconds']):.3f}), commit"
        f" {row['commit_seconds']:.3f}; peak {in_bytes(row['peak'])}, predicted"
        f" {in_bytes(row['predicted'])} ({row['predicted'] / peak:.4f}); {row['residents']} stay;"
        f" {'compiled' if row['compiled'] else 'eager'}, {row['activations']};"
        f" {in_bytes(row['page_locked'])} page-locked; loss {row['loss']:.4f};"
        f" made in {row['made_seconds']:.1f} s"
    )


def arguments_of(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=sorted(MODELS), default="8b")
    parser.add_argument("--layers", type=int, help="fewer blocks than the geometry has")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--root", type=Path, help="where the store is made; a RAM disk")
    parser.add_argument("--cases", default=CASES, help="comma-separated, as the cases above")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", default="q_proj,v_proj")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--activation-placement", default="host")
    parser.add_argument("--profile", type=Path, help="file for the kernels of the first case")
    parser.add_argument("--limit-seconds", type=float, default=160)
    parser.add_argument("--json", type=Path, help="file for the rows")
    found = parser.parse_args(words)
    found.geometry = MODELS[found.model]
    if found.layers:
        found.geometry = replace(found.geometry, num_layers=found.layers)
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Print a line a case."""
    arguments = arguments_of(words)
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.root, prefix="lora-8b-") as folder:
        root = Path(folder)
        make_store(root / "store", arguments.geometry, Device.from_name(arguments.device))
        make_rows(root / "rows", arguments.geometry)
        print(f"store made in {time.monotonic() - began:.1f} s", flush=True)
        for index, text in enumerate(arguments.cases.split(",")):
            if time.monotonic() - began > arguments.limit_seconds:
                print(f"{text}: left out, {arguments.limit_seconds:.0f} s are over")
                continue
            rows.append(measured(arguments, root, index, Case.of(text)))
            print(line_of(rows[-1]), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
