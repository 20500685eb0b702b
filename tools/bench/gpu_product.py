"""The product's arm of the benchmark on a GPU: a run of `train` that is ready to step.

Owns the models' geometries, the flags of an arm, and the comparison with resident training, bit for
bit. Knows nothing of timing.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardb import torch_adaptor
from tools.bench.gpu_arms import Resident
from tools.bench.gpu_host_lanes import host_spans
from trainer.data.batches import batch_at
from trainer.device_lanes import Span
from trainer.found import find_run
from trainer.opening import Surroundings
from trainer.pipeline.trace import write_trace
from trainer.plan import Plan, make_plan
from trainer.progress import progress_for
from trainer.run import Run
from trainer.signals import StopRequest
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
    """Write the lanes of two steps, and what the host's threads did."""
    pipeline = product.run.engine.pipeline
    assert pipeline is not None, "only the pipeline has lanes"
    host: list[Span] = []
    pipeline.lanes.begin_trace()
    with host_spans(host):
        product.step()
        product.step()
    spans = pipeline.lanes.take_trace()
    write_trace(path, [*spans, *host])
    busy: dict[str, float] = {}
    for span in spans:
        busy[span.lane] = busy.get(span.lane, 0.0) + span.ended - span.began
    whole = max(s.ended for s in spans) - min(s.began for s in spans)
    print(f"traced {whole:.4f} s:", {k: round(v, 4) for k, v in busy.items()}, flush=True)


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
