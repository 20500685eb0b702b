"""How much memory a run's step takes, by the way that it will go: plain, or through the pipeline.

Owns that choice, and what stages that stay on the device add. The walks count; `pipeline.choosing`
says which way. Knows nothing of what is free.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.host_walk import predicted_host_phases
from trainer.pipeline.choosing import pipeline_way
from trainer.pipeline.walk import predicted_pipeline_phases, predicted_spending
from trainer.recipe import Settings
from trainer.vram import StepShape, predicted_phases


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceNeed:
    """What a step takes of a device.

    phases: without stages that stay there; stages: how many the model has; kept: how many stay by
    the prediction; most_bytes: never more, as a budget is filled by what is measured.
    """

    phases: dict[str, int]
    stages: int = 0
    kept: int = 0
    most_bytes: int

    @property
    def step_bytes(self) -> int:
        """Give what the step itself takes."""
        return max(self.phases.values())

    @property
    def fullest(self) -> str:
        """Name the phase that takes most."""
        return max(self.phases, key=lambda phase: self.phases[phase])


def device_need(shape: StepShape, settings: Settings) -> DeviceNeed:
    """Give what a step takes of a CUDA device."""
    way = pipeline_way(settings, shape.options, is_host=False)
    if way is None:
        phases = predicted_phases(shape)
        return DeviceNeed(phases=phases, most_bytes=max(phases.values()))
    phases = predicted_pipeline_phases(shape, way, is_host=False)
    needed, budget = max(phases.values()), way.vram_budget_bytes
    if budget is None:
        count = len(predicted_spending(shape, way, 0)[0])
        return DeviceNeed(phases=phases, stages=count, most_bytes=needed)
    within = budget - way.sizes.margin_bytes
    stages, spent, everything = predicted_spending(shape, way, max(0, within - needed))
    return DeviceNeed(
        phases=phases,
        stages=len(stages),
        kept=len(spent.stages),
        most_bytes=max(needed, min(needed + everything, within)),
    )


def step_bytes(shape: StepShape, settings: Settings) -> int:
    """Give what a step takes of a CUDA device, without stages that stay there."""
    return device_need(shape, settings).step_bytes


def host_phases(shape: StepShape, settings: Settings) -> dict[str, int]:
    """Give what each phase of a step on a CPU takes."""
    way = pipeline_way(settings, shape.options, is_host=True)
    if way is None:
        return predicted_host_phases(shape)
    return predicted_pipeline_phases(shape, way, is_host=True)
