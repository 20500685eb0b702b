"""Whether a run's steps go through the pipeline, and how that spends memory.

Owns what the settings mean for the pipeline. Knows nothing of how it works. None of it changes a
bit.
"""

from __future__ import annotations

from trainer.device import Device
from trainer.errors import InputError
from trainer.options import EngineOptions
from trainer.pipeline.pipeline import PipelineSettings, is_supported
from trainer.recipe import Settings
from trainer.sizes import size_of


def pipeline_settings(
    settings: Settings, options: EngineOptions, device: Device
) -> PipelineSettings | None:
    """Give the pipeline's settings; None where steps take the plain way.

    Raises:
        InputError: `--device-pipeline on` with settings that it cannot do.
    """
    if settings.device_pipeline == "on" and not is_supported(options):
        raise InputError(
            "--device-pipeline on: it does AdamW with fp32 weights and fp32 or bf16 state, in fp32"
            " or bf16, with --activations recompute, --activation-placement vram or host, and"
            " without --timing-sync-cuda, on rows without records that are kept apart: change"
            " these, or give auto"
        )
    return pipeline_way(settings, options, is_host=device.is_host)


def pipeline_way(
    settings: Settings, options: EngineOptions, *, is_host: bool
) -> PipelineSettings | None:
    """Give the pipeline's settings where steps go through it, refusing nothing."""
    wanted = settings.device_pipeline
    if wanted == "off" or (wanted == "auto" and is_host) or not is_supported(options):
        return None
    return PipelineSettings(
        activations_on_host=options.activation_placement == "host",
        gradients=settings.gradient_placement,
        vram_budget_bytes=vram_budget_of(settings),
    )


def vram_budget_of(settings: Settings) -> int | None:
    """Give the bytes of device memory to fill; None: no more than a step needs."""
    if settings.vram_budget is None:
        return None
    return size_of(settings.vram_budget, "--vram-budget")
