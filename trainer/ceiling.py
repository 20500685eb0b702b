"""What this machine can do at most, measured, and how near to it a step comes.

Owns two short measurements, made once a machine and kept beside the step log: the rate of large
matrix products in the run's dtype, and the rate of copying from host memory to where the step
computes. From them follows the shortest time in which a step's arithmetic could be done or its
shards be moved, in both directions at once, whichever is longer. Disks are not measured. Knows
nothing of stores. A measurement made while others used the machine is too low: a step that beats it
raises it, and the next start measures anew and keeps the higher rates.

Formulas: a decoder's step takes 6 operations a parameter and token, embeddings aside, and
12 x layers x heads x head width x sequence a token for attention (Chowdhery et al., "PaLM",
appendix B). What is computed twice to save memory counts once: it is a cost, not work.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from trainer.device import Device
from trainer.model.stages import parameter_count
from trainer.recipe import Recipe

FILE_NAME = "ceiling.json"
# Marks rates that a step has beaten.
BEATEN = "beaten"
REPEATS = 5
# A product in a dtype that a processor has no instructions for takes that long by itself.
LIMIT_SECONDS = 0.1
# Sizes that take some ten milliseconds on the CPU of a laptop, and on a large GPU.
HOST_WIDTH, DEVICE_WIDTH = 640, 8192
HOST_COPY_BYTES, DEVICE_COPY_BYTES = 32 << 20, 256 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceiling:
    """Measured rates: operations a second of matrix products, bytes a second of copies."""

    matmul_flops_per_second: float
    copy_bytes_per_second: float

    def percent(self, *, flops: float, moved_bytes: float, seconds: float) -> float:
        """Give the least time for a piece of work, as a percentage of the time it took."""
        least_seconds = max(
            flops / self.matmul_flops_per_second, moved_bytes / self.copy_bytes_per_second
        )
        return 100 * least_seconds / seconds

    def beaten_by(self, *, flops: float, moved_bytes: float, seconds: float) -> Ceiling:
        """Give it raised to what a piece of work did, whose least time was longer than it took."""
        return self.at_least(
            Ceiling(
                matmul_flops_per_second=flops / seconds, copy_bytes_per_second=moved_bytes / seconds
            )
        )

    def at_least(self, other: Ceiling) -> Ceiling:
        """Give the higher one of each rate."""
        return Ceiling(
            matmul_flops_per_second=max(
                self.matmul_flops_per_second, other.matmul_flops_per_second
            ),
            copy_bytes_per_second=max(self.copy_bytes_per_second, other.copy_bytes_per_second),
        )


def step_flops(recipe: Recipe) -> float:
    """Give the operations that one step needs."""
    model = recipe.model
    looked_up = 0 if model.tied_embeddings else model.vocab_size * model.hidden_size
    multiplied = parameter_count(model) - looked_up
    attention = 12 * model.num_layers * model.num_heads * model.head_dim * recipe.seq_len
    return float((6 * multiplied + attention) * recipe.rows_per_step * recipe.seq_len)


def ceiling_of(recipe: Recipe, dtype: torch.dtype, device: Device, folder: Path) -> Ceiling:
    """Give what was measured on this machine before, else measure: a tenth of a second.

    It is measured anew where a step has beaten it.
    """
    key, known = _key(recipe, dtype, device), _read(folder / FILE_NAME)
    rates = dict(known.get(key, {}))
    is_beaten = bool(rates.pop(BEATEN, False))
    if rates and not is_beaten:
        return Ceiling(**rates)
    found = measure(dtype, device)
    found = found.at_least(Ceiling(**rates)) if rates else found
    _write(folder / FILE_NAME, known | {key: asdict(found)})
    return found


def keep_beaten(
    ceiling: Ceiling, recipe: Recipe, dtype: torch.dtype, device: Device, folder: Path
) -> None:
    """Keep rates that a step has raised, to be measured anew at the next start."""
    known = _read(folder / FILE_NAME)
    rates = asdict(ceiling) | {BEATEN: True}
    _write(folder / FILE_NAME, known | {_key(recipe, dtype, device): rates})


def _key(recipe: Recipe, dtype: torch.dtype, device: Device) -> str:
    return f"{platform.node()} {device.name} {dtype} threads={recipe.threads} {torch.__version__}"


def measure(dtype: torch.dtype, device: Device) -> Ceiling:
    """Measure both rates; the best of a few repeats, since others may use the machine."""
    width = HOST_WIDTH if device.is_host else DEVICE_WIDTH
    left = torch.ones(width, width, dtype=dtype, device=device.torch_device)
    product = torch.empty_like(left)
    seconds = shortest_seconds(
        lambda: torch.mm(left, left, out=product),
        device,
        limit_seconds=products_limit_seconds(device),
    )
    matmul = 2 * width**3 / seconds
    size = HOST_COPY_BYTES if device.is_host else DEVICE_COPY_BYTES
    source = torch.ones(size, dtype=torch.uint8, pin_memory=not device.is_host)
    target = torch.empty_like(source, device=device.torch_device)
    copy = size / shortest_seconds(lambda: target.copy_(source, non_blocking=True), device)
    return Ceiling(matmul_flops_per_second=matmul, copy_bytes_per_second=copy)


def products_limit_seconds(device: Device) -> float:
    """Give after how much time no more products are measured.

    A processor may have no instructions for a dtype. On a GPU the first product brings its library
    along, which takes longer than all the others: it must not be the only one.
    """
    return LIMIT_SECONDS if device.is_host else float("inf")


def shortest_seconds(
    work: Callable[[], object], device: Device, *, limit_seconds: float = float("inf")
) -> float:
    """Give the least time of a few that some work took to its end; no more once the limit is up."""
    best, all_began = float("inf"), time.perf_counter()
    for _ in range(REPEATS):
        device.wait()
        began = time.perf_counter()
        work()
        device.wait()
        ended = time.perf_counter()
        best = min(best, ended - began)
        if ended - all_began > limit_seconds:
            break
    return best


def _read(path: Path) -> dict[str, dict[str, float]]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write(path: Path, known: dict[str, dict[str, float]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps(known, indent=1), encoding="utf-8")
    os.replace(draft, path)
