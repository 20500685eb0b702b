"""Training on a GPU through the whole product against resident training of the same blocks.

Arms, interleaved in one process: `train` as a run makes its steps (data loader, active store on a
RAM disk, one commit a step), once for each memory setting; resident training with every block
checkpointed; the same without the cost of asking for single kernels (`recorded`); and without
checkpoints. Ratios are taken within a round. Memory is what an arm held at most in
its first steps, above what was held before it was made. With --check, the run's weights are
compared with the resident ones, bit for bit, after the same steps.

    python -m tools.bench.gpu_throughput --data rows/ --model A --vram-budget off,2GiB --json a.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardb import torch_adaptor
from tools.bench.gpu_arms import Recorded, Resident
from trainer.ceiling import step_flops
from trainer.data.batches import batch_at
from trainer.device import Device
from trainer.errors import InputError
from trainer.found import find_run
from trainer.opening import Surroundings
from trainer.pipeline.trace import write_trace
from trainer.plan import Plan, make_plan
from trainer.progress import progress_for
from trainer.run import Run
from trainer.signals import StopRequest
from trainer.sizes import in_bytes
from trainer.start import opened_run
from trainer.watchdog import Watchdog

MODELS: dict[str, dict[str, Any]] = {
    "A": {"preset": "perkunas-v2.9-100m"},
    "B": {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "num_layers": 22,
        "num_heads": 32,
        "intermediate_size": 5632,
        "max_position_embeddings": 1024,
    },
    "7B": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_layers": 32,
        "num_heads": 32,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
    },
    "tiny": {
        "vocab_size": 8000,
        "hidden_size": 64,
        "num_layers": 3,
        "num_heads": 4,
        "intermediate_size": 128,
        "max_position_embeddings": 512,
    },
}
WARM_STEPS = 7


class Product:
    """A run of `train` that is ready to step."""

    def __init__(self, stack: ExitStack, given: dict[str, Any]) -> None:
        self.plan = make_plan(find_run(given), given, [])
        progress = progress_for(None, validates=False)
        watchdog = stack.enter_context(Watchdog(progress.note))
        around = Surroundings(note=progress.note, watchdog=watchdog, allow_network=False)
        self.run: Run = stack.enter_context(opened_run(self.plan, around, progress, StopRequest()))
        self.lines: list[dict[str, Any]] = []

    def step(self) -> None:
        """Make one step as the run's loop does."""
        line = self.run.step()
        assert line is not None, "a step was skipped"
        self.run.logs.append(line)
        self.lines.append(line)


def rows_of(plan: Plan, step: int) -> list[NDArray[np.int64]]:
    """Give the micro-batches of a step, as the run reads them."""
    recipe = plan.recipe
    rows = recipe.micro_batch_size
    return [
        batch_at(
            plan.inputs.rows,
            seed=recipe.seed,
            position=(step - 1) * recipe.rows_per_step + index * rows,
            batch_rows=rows,
            shuffle=recipe.shuffle_train,
            row_order="shuffled",
        )
        for index in range(recipe.gradient_accumulation_steps)
    ]


def held_bytes(device: Device) -> int:
    """Give what tensors hold now."""
    device.wait()
    device.forget_peak()
    return device.peak_bytes()


def differences(product: Product, steps: int) -> list[str]:
    """Train resident for as many steps; name what is not the same."""
    plan = product.plan
    resident = Resident(plan, checkpointed=False)
    found = []
    for step in range(1, steps + 1):
        seen = step * plan.recipe.rows_per_step * plan.recipe.seq_len
        expected = resident.step(rows_of(plan, step), plan.recipe.schedule.learning_rate(seen))
        assert expected is not None
        line = product.lines[step - 1]
        found += [
            f"step {step}: {field} {line[field]} {getattr(expected, field)}"
            for field in ("loss", "grad_norm", "clip_scale")
            if line[field] != getattr(expected, field)
        ]
    arrays = resident.arrays()
    with product.run.tiers.training.at(commit=product.run.head.id) as view:
        for name in view.names():
            if name.startswith("meta/"):
                continue
            for tensor, value in torch_adaptor.tensors(view.read(name)).items():
                if not np.array_equal(arrays[f"{name}:{tensor}"], value.numpy()):
                    found.append(f"{name}:{tensor}")
    return found


def trace(product: Product, path: Path) -> None:
    """Write the lanes of two steps."""
    pipeline = product.run.engine.pipeline
    assert pipeline is not None, "only the pipeline has lanes"
    pipeline.lanes.begin_trace()
    product.step()
    product.step()
    spans = pipeline.lanes.take_trace()
    write_trace(path, spans)
    busy: dict[str, float] = {}
    for span in spans:
        busy[span.lane] = busy.get(span.lane, 0.0) + span.ended - span.began
    whole = max(s.ended for s in spans) - min(s.began for s in spans)
    print(f"traced {whole:.4f} s:", {k: round(v, 4) for k, v in busy.items()}, flush=True)


def timed(device: Device, step: Callable[[], object], count: int) -> list[float]:
    """Give the seconds of each of `count` steps, the device idle at both ends of all."""
    device.wait()
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    device.wait()
    return seconds


def given_of(arguments: argparse.Namespace, folder: Path, active: Path, budget: str) -> Any:
    """Give the flags of one arm's run."""
    given: dict[str, Any] = {
        **MODELS[arguments.model],
        "store": str(folder / "run"),
        "active": str(active / "active"),
        "data_dir": arguments.data,
        "device": arguments.device,
        "dtype": "bf16",
        "activations": "recompute",
        "micro_batch_size": arguments.micro_batch_size,
        "gradient_accumulation_steps": arguments.accumulation,
        "learning_rate": arguments.learning_rate,
        "max_grad_norm": arguments.max_grad_norm,
        "warmup_tokens": 100_000,
        "validate_every": 0,
        "seed": 3,
        "lm_head_chunk_tokens": arguments.chunk,
        "activation_placement": arguments.activation_placement,
        "gradient_placement": arguments.gradient_placement,
        "vram_budget": budget,
        "durable_every": arguments.durable_every,
        "device_pipeline": arguments.pipeline,
    }
    if arguments.seq_len:
        given |= {"data_dtype": "uint16", "seq_len": arguments.seq_len}
    return given


def resident_step(name: str, plan: Plan) -> Callable[[], object]:
    """Make a resident arm; give what makes one of its steps, on a few steps' rows in turn."""
    trainer = (
        Recorded(plan)
        if name == "recorded"
        else Resident(plan, checkpointed=name == "checkpointed")
    )
    rows = cycle([rows_of(plan, step) for step in range(1, 5)])
    return lambda: trainer.step(next(rows), plan.recipe.learning_rate)


def measure(arguments: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    """Make every arm, measure its memory, then time all of them in turn."""
    device = Device.from_name(arguments.device)
    arms: dict[str, Callable[[], object]] = {}
    memory: dict[str, int] = {}
    result: dict[str, Any] = {}
    products: dict[str, Product] = {}

    def add(name: str, make: Callable[[], Callable[[], object]]) -> None:
        before = held_bytes(device)
        began = time.perf_counter()
        arms[name] = make()
        timed(device, arms[name], WARM_STEPS)
        device.forget_peak()
        timed(device, arms[name], 2)
        memory[name] = device.peak_bytes() - before
        seconds = time.perf_counter() - began
        print(f"{name}: made in {seconds:.1f} s, {in_bytes(memory[name])}", flush=True)

    for budget in arguments.vram_budget.split(","):
        name = "train" if budget == "off" else f"train {budget}"

        def product(budget: str = budget, name: str = name) -> Callable[[], object]:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.store)))
            active = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.active)))
            products[name] = Product(stack, given_of(arguments, folder, active, budget))
            return products[name].step

        add(name, product)
    first = next(iter(products.values()))
    if arguments.trace:
        trace(first, arguments.trace)
    if arguments.check:
        result["differences"] = differences(first, len(first.lines))
        print("differences:", result["differences"][:8], len(result["differences"]), flush=True)
    for name in ("recorded", "checkpointed", "resident"):
        if name not in arguments.arms.split(","):
            continue

        add(name, partial(resident_step, name, first.plan))
    seconds: dict[str, list[list[float]]] = {name: [] for name in arms}
    for _ in range(arguments.rounds):
        for name, step in arms.items():
            seconds[name].append(timed(device, step, arguments.steps))
    recipe = first.plan.recipe
    tokens = recipe.rows_per_step * recipe.seq_len
    ceiling = first.run.ceiling.matmul_flops_per_second
    return result | {
        "model": arguments.model,
        "arguments": vars(arguments),
        "tokens_per_step": tokens,
        "device": device.name,
        "torch": torch.__version__,
        "rows": rows_summary(seconds, memory, tokens, step_flops(recipe) / ceiling),
        "lines": {
            name: [_short(line) for line in each.lines[-arguments.steps :]]
            for name, each in products.items()
        },
    }


def rows_summary(
    seconds: dict[str, list[list[float]]], memory: dict[str, int], tokens: int, least: float
) -> dict[str, dict[str, float]]:
    """Give an arm's median, its ratios to the resident arms by round, and its memory."""
    medians = {name: [statistics.median(r) for r in rounds] for name, rounds in seconds.items()}
    found: dict[str, dict[str, float]] = {}
    for name, mine in medians.items():
        middle = statistics.median(mine)
        row: dict[str, float] = {
            "step_ms": 1e3 * middle,
            "tokens_per_second": tokens / middle,
            "ceiling_percent": 100 * least / middle,
            "peak_bytes": memory[name],
        }
        for base in ("recorded", "checkpointed", "resident"):
            if base in medians:
                ratios = [b / m for b, m in zip(medians[base], mine, strict=True)]
                row[f"of_{base}"] = statistics.median(ratios)
                row[f"of_{base}_low"], row[f"of_{base}_high"] = min(ratios), max(ratios)
        found[name] = row
    return found


def _short(line: dict[str, Any]) -> dict[str, Any]:
    wanted = (
        *("step", "seconds", "commit_seconds", "publish_seconds", "clip_scale", "grad_norm"),
        *("loss", "timings", "bytes_read", "bytes_written"),
    )
    return {key: line[key] for key in wanted if key in line}


def print_table(result: dict[str, Any]) -> None:
    """Print a line an arm."""
    print(f"{result['model']}, {result['tokens_per_step']:,} tokens a step")
    for name, row in result["rows"].items():
        ratios = " ".join(
            f"{row[key]:.3f} ({row[f'{key}_low']:.3f}-{row[f'{key}_high']:.3f}) {key}"
            for key in ("of_recorded", "of_checkpointed", "of_resident")
            if key in row
        )
        print(
            f"  {name:16} {row['step_ms']:8.1f} ms {row['tokens_per_second']:9,.0f} tokens/s"
            f" {row['ceiling_percent']:5.1f} % {row['peak_bytes'] / 2**30:6.2f} GiB  {ratios}",
            flush=True,
        )


def arguments_of(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", required=True, help="folder of prepared rows, or of .bin files")
    parser.add_argument("--seq-len", type=int, default=0, help="of uint16 .bin files")
    parser.add_argument("--model", choices=MODELS, default="A")
    parser.add_argument("--micro-batch-size", type=int, default=64)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--vram-budget", default="off", help="one or more, with commas")
    parser.add_argument("--activation-placement", default="vram")
    parser.add_argument("--gradient-placement", default="vram")
    parser.add_argument("--pipeline", default="auto")
    parser.add_argument("--durable-every", type=int, default=0)
    parser.add_argument("--arms", default="recorded,checkpointed,resident")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--store", default="/tmp")
    parser.add_argument("--active", default="/dev/shm")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when --check found a difference."""
    arguments = arguments_of(words)
    try:
        with ExitStack() as stack:
            result = measure(arguments, stack)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_table(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, default=str))
    return 1 if result.get("differences") else 0


if __name__ == "__main__":
    sys.exit(main())
