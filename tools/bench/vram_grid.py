"""Compare the predicted memory of a CUDA device with what steps take, over a grid of steps.

Owns the grid and the table. Every case trains in a store in host memory, the last of its steps are
measured, and all of it is given up before the next case. Without a device, `--predict-only` prints
the predictions. With `--pipeline` steps go through the pipeline and are predicted so; cases that it
does not do are left out.

    python -m tools.bench.vram_grid --json rows.json
    python -m tools.bench.vram_grid --pipeline --limit-seconds 200 --json rows.json
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
from typing import Any

import numpy as np

from tests.support.memory_transaction import MemoryStore
from trainer.device import Device
from trainer.engine import Engine, EngineOptions
from trainer.errors import InputError
from trainer.model import layers
from trainer.model.config import ModelConfig
from trainer.model.presets import preset
from trainer.pipeline.pipeline import PipelineSettings, is_supported
from trainer.pipeline.walk import predicted_pipeline_phases
from trainer.sizes import in_bytes
from trainer.vram import StepShape, predicted_phases

LIMIT_SECONDS = 110
# The first step compiles, the second one records and is clipped or not as the first one was.
PLAIN_STEPS, PIPELINE_STEPS = 2, 4


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A case, what was predicted and, where it was trained, what it took."""

    name: str
    predicted: int
    peak: int | None

    @property
    def ratio(self) -> float | None:
        """Give predicted over measured: below 1 is a prediction that was too low."""
        return None if not self.peak else self.predicted / self.peak


def cases() -> Iterator[tuple[str, StepShape]]:
    """Give the grid: a base, each of its sides changed by itself, and a few changed together."""
    small = preset("perkunas-v2.8-50m")
    base = StepShape(
        model=small,
        options=EngineOptions(dtype="bf16", lm_head_chunk_tokens=4096),
        micro_batch_size=8,
        accumulation=1,
        seq_len=512,
    )
    wide = replace(preset("perkunas-v2.0"), num_layers=6)
    grouped = replace(small, num_kv_heads=2)
    models: dict[str, ModelConfig] = {
        "demo": preset("demo"),
        "wide": wide,
        "32k words": replace(small, vocab_size=32000),
        "tied": replace(small, vocab_size=32000, tied_embeddings=True),
        "grouped": grouped,
        "qwen3-like": replace(grouped, qk_norm=True, attention_bias=True),
    }
    yield "base", base
    for name, model in models.items():
        yield name, replace(base, model=model)
    for rows in (1, 32):
        yield f"{rows} rows", replace(base, micro_batch_size=rows)
    for tokens in (128, 2048):
        yield f"{tokens} tokens", replace(base, seq_len=tokens)
    for count in (3, 8):
        yield f"{count} micro-batches", replace(base, accumulation=count)
    changes: list[tuple[str, Any]] = [
        ("optimizer", "lion"),
        ("optimizer", "adafactor"),
        ("grad_clip_mode", "shard"),
        ("dtype", "fp32"),
        ("dtype", "fp16"),
        ("lm_head_chunk_tokens", 512),
        ("activations", "keep"),
        ("activation_placement", "host"),
        ("optimizer_state_dtype", "int8"),
        ("master_weight_dtype", "bf16"),
    ]
    for field, value in changes:
        yield f"{field} {value}", replace(base, options=replace(base.options, **{field: value}))
    fp32 = replace(base.options, dtype="fp32", grad_clip_mode="shard")
    yield "wide, fp32, 4 x 8 rows", replace(base, model=wide, options=fp32, accumulation=4)
    long = replace(base, model=wide, micro_batch_size=16, seq_len=2048)
    yield "wide, 16 x 2048", long
    yield (
        "wide, 16 x 2048, 512 logits",
        replace(long, options=replace(long.options, lm_head_chunk_tokens=512)),
    )
    for name, shape in [("base", base), ("qwen3-like", replace(base, model=models["qwen3-like"]))]:
        yield f"compiled, {name}", _compiled(shape)
    yield "compiled, 4 x 8 rows", _compiled(replace(base, accumulation=4))
    yield "compiled, wide, fp32", _compiled(replace(base, model=wide, options=fp32))
    yield "compiled, wide, 16 x 2048", _compiled(long)
    host = replace(base.options, activation_placement="host")
    yield "compiled, wide, host", _compiled(replace(base, model=wide, options=host))


def _compiled(shape: StepShape) -> StepShape:
    return replace(shape, options=replace(shape.options, compile_blocks=True))


def settings_of(shape: StepShape) -> PipelineSettings:
    """Give the pipeline's settings of a case."""
    return PipelineSettings(
        activations_on_host=shape.options.activation_placement == "host", gradients="vram"
    )


def measured_bytes(shape: StepShape, name: str, *, pipeline: bool = False) -> int:
    """Train a few steps on a device and give the peak of the last ones, alone on it."""
    layers.rotary_angles.cache_clear()
    device = Device.from_name(name)
    engine = Engine(shape.model, shape.options, device)
    if pipeline:
        engine.use_pipeline(settings_of(shape))
    try:
        _train(engine, shape, PIPELINE_STEPS if pipeline else PLAIN_STEPS)
        return device.peak_bytes()
    finally:
        engine.close()
        del engine
        gc.collect()  # recordings and steps know one another: what they hold is not the next case's
        device.forget_peak()


def _train(engine: Engine, shape: StepShape, steps: int) -> None:
    """Train; the peak counts from the second step on."""
    store = MemoryStore(poison=False)
    txn = store.begin()
    engine.initialise(txn, 0)
    txn.commit()
    random = np.random.default_rng(0)
    width = (shape.micro_batch_size, shape.seq_len + 1)
    for step in range(1, steps + 1):
        if step <= 2:
            engine.device.forget_peak()
        txn = store.begin()
        rows = [
            random.integers(0, shape.model.vocab_size, width) for _ in range(shape.accumulation)
        ]
        engine.train_step(txn, rows, step=step, learning_rate=1e-4)
        txn.commit()


def predicted(shape: StepShape, *, pipeline: bool) -> dict[str, int]:
    """Give what each phase is predicted to hold."""
    if not pipeline:
        return predicted_phases(shape)
    return predicted_pipeline_phases(shape, settings_of(shape), is_host=False)


def arguments_of(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--predict-only", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--pipeline", action="store_true", help="train through the pipeline")
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--limit-seconds", type=float, default=LIMIT_SECONDS)
    parser.add_argument("--json", type=Path, help="file for the rows")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Print the table and one line that sums it up; 1 where a prediction was too low."""
    given = arguments_of(words)
    try:
        device = None if given.predict_only else Device.from_name(given.device).name
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    started, found = time.monotonic(), []
    for name, shape in cases():
        if given.only not in name or (given.pipeline and not is_supported(shape.options)):
            continue
        if time.monotonic() - started > given.limit_seconds:
            print(f"{name:<28} left out: {given.limit_seconds:.0f} s are over")
            continue
        found.append(_case(name, shape, device, pipeline=given.pipeline))
        if given.json:
            given.json.write_text(json.dumps([asdict(case) for case in found], indent=1))
    return _sum_up(found, time.monotonic() - started)


def _case(name: str, shape: StepShape, device: str | None, *, pipeline: bool) -> Measured:
    """Measure a case and print its line."""
    peak = None if device is None else measured_bytes(shape, device, pipeline=pipeline)
    phases = predicted(shape, pipeline=pipeline)
    fullest = max(phases, key=lambda phase: phases[phase])
    case = Measured(name=name, predicted=phases[fullest], peak=peak)
    ratio = "" if case.ratio is None else f"{case.ratio:.4f}"
    print(
        f"{case.name:<28} {in_bytes(case.predicted):>11} {in_bytes(peak or 0):>11}"
        f" {ratio:>7}  {case.predicted - (peak or 0):>14,} bytes  {fullest}",
        flush=True,
    )
    return case


def _sum_up(found: list[Measured], seconds: float) -> int:
    ratios = {case.name: case.ratio for case in found if case.ratio is not None}
    if not ratios:
        print(f"vram_grid: {len(found)} cases predicted, none measured, {seconds:.0f} s")
        return 0
    lowest, highest = min(ratios, key=lambda n: ratios[n]), max(ratios, key=lambda n: ratios[n])
    under = sum(ratio < 1 for ratio in ratios.values())
    over = sum(ratio > 1.01 for ratio in ratios.values())
    print(
        f"vram_grid: {len(ratios)} cases, {under} under, {over} more than 1 % over;"
        " predicted/measured from"
        f" {ratios[lowest]:.4f} ({lowest}) to {ratios[highest]:.4f} ({highest}), {seconds:.0f} s"
    )
    return 1 if under else 0


if __name__ == "__main__":
    sys.exit(main())
