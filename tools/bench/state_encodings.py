"""What does a smaller form of state or weights cost in loss? A tiny model, 100 steps, all forms.

    python -m tools.bench.state_encodings

Prints one line of JSON a form: bytes of a commit, training loss of the last ten steps, held-out
loss, and the difference of the latter to fp32. The last form is a control that is not offered:
bf16 weights rounded to nearest.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from tests.support.memory_training import MemoryTraining
from trainer.model.config import ModelConfig
from trainer.optimizers import bf16_masters
from trainer.options import EngineOptions

MODEL = ModelConfig(
    vocab_size=64,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    max_position_embeddings=64,
)
FORMS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "state bf16": {"optimizer_state_dtype": "bf16"},
    "state int8": {"optimizer_state_dtype": "int8"},
    "weights bf16": {"master_weight_dtype": "bf16"},
    "weights bf16, state int8": {"master_weight_dtype": "bf16", "optimizer_state_dtype": "int8"},
    "weights bf16 to nearest": {"master_weight_dtype": "bf16"},
}


def main() -> None:
    """Print a line a form and rate."""
    parser = argparse.ArgumentParser(description="Compare forms of state and weights.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, nargs="+", default=[3e-3, 1e-4])
    parser.add_argument("--seeds", type=int, default=3)
    chosen = parser.parse_args()
    for rate in chosen.learning_rate:
        exact: list[float] = []
        for name in FORMS:
            runs = [measured(name, rate, seed, chosen.steps) for seed in range(chosen.seeds)]
            held_out = [run["held_out_loss"] for run in runs]
            exact = exact or held_out
            differences = [a - b for a, b in zip(held_out, exact, strict=True)]
            line = {
                "form": name,
                "learning_rate": rate,
                "commit_bytes": int(runs[0]["commit_bytes"]),
                "train_loss": round(float(np.mean([run["train_loss"] for run in runs])), 5),
                "held_out_loss": round(float(np.mean(held_out)), 5),
                "difference": round(float(np.mean(differences)), 5),
                "difference_max": round(max(abs(each) for each in differences), 5),
            }
            print(json.dumps(line), flush=True)


def measured(name: str, rate: float, seed: int, steps: int) -> dict[str, float]:
    """Train one form."""
    torch.set_num_threads(1)
    options = replace(EngineOptions(), seed=seed, **FORMS[name])
    training = MemoryTraining(MODEL, options, seed, poison=False)
    losses = []
    to_nearest = patch.object(bf16_masters, "round_by_chance", _to_nearest)
    for step in range(steps):
        if name.endswith("to nearest"):
            with to_nearest:
                result = training.step([_rows(1000 * seed + step, 8)], rate)
        else:
            result = training.step([_rows(1000 * seed + step, 8)], rate)
        losses.append(result.loss)
    held_out = training.engine.evaluate(training.store, [_rows(10**6 + n, 16) for n in range(8)])
    return {
        "commit_bytes": float(sum(view.bytes for view in training.store.shards.values())),
        "train_loss": float(np.mean(losses[-10:])),
        "held_out_loss": held_out.loss,
    }


def _to_nearest(values: Tensor, *_place: int) -> Tensor:
    return values.to(torch.bfloat16)


def _rows(seed: int, count: int) -> np.ndarray:
    """Give walks over the ids with steps of 0, 1 or 2: the best loss is ln 3 = 1.0986."""
    draw = np.random.default_rng(seed)
    walk = draw.integers(0, 3, (count, 33)).cumsum(axis=1)
    rows: np.ndarray = (draw.integers(0, 64, (count, 1)) + walk) % 64
    return rows


if __name__ == "__main__":
    main()
