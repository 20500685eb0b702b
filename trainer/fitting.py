"""`--fit` on this machine: which memory is to be fitted into, and the choice by what it measures.

Owns what a budget means on a CPU and on a device, and which predictor says what a step takes of
it. Knows nothing of how a choice is made, nor of plans.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from trainer.autotune import Asked, Need, Tuned, tune
from trainer.budget import step_memory, step_shape
from trainer.device import Device
from trainer.host_memory import machine_memory
from trainer.measured import Machine, measured_rates
from trainer.pipeline.choosing import pipeline_way, vram_budget_of
from trainer.recipe import Recipe, Settings
from trainer.recipe_build import Given
from trainer.step_memory import device_need
from trainer.vram import StepShape

# Of the memory that is free on a machine without a device, when no budget is given: what is kept
# in memory beside a step, shards among it, needs the other half.
HOST_SHARE = 2


def tuned_here(
    recipe: Recipe,
    settings: Settings,
    store: Path,
    given: Given,
    note: Callable[[str], None],
) -> Tuned:
    """Measure this machine and choose; InputError where nothing fits."""
    torch.set_num_threads(recipe.threads)
    device = Device.from_name(recipe.device)
    options = step_shape(recipe, settings, "recompute").options
    pipelined = pipeline_way(settings, options, is_host=device.is_host) is not None
    asked = Asked(
        recipe=recipe,
        settings=settings,
        given=frozenset(given),
        budget_bytes=_budget_bytes(settings, device),
        pipelined=pipelined,
        is_host=device.is_host,
    )
    machine = Machine(
        device=device,
        store=store,
        active=Path(settings.active) if settings.active else None,
        allow_network=bool(given.get("allow_network")),
        pipelined=pipelined,
    )
    rates = measured_rates(step_shape(recipe, settings, "recompute"), machine, note)
    note("--fit chooses by what steps are predicted to take")
    return tune(asked, rates, _need_on_host if device.is_host else _need_on_device)


def _budget_bytes(settings: Settings, device: Device) -> int:
    asked, memory = vram_budget_of(settings), device.memory_bytes()
    if asked is not None:
        return asked
    return machine_memory()[1] // HOST_SHARE if memory is None else memory[0]


def _need_on_host(shape: StepShape, settings: Settings) -> Need:
    return Need(bytes=sum(step_memory(shape, settings).values()))


def _need_on_device(shape: StepShape, settings: Settings) -> Need:
    need = device_need(shape, settings)
    share = need.kept / need.stages if need.stages else 0.0
    return Need(bytes=need.step_bytes, kept_share=share)
