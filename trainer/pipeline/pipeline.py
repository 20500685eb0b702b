"""What a device keeps from step to step: lanes, slots, page-locked images, resident stages.

Owns the memory of the pipeline: everything here is made once (`trainer.pipeline.footprint` says how
much), and a step only uses it. Knows nothing of the course of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.device_lanes import Lanes, lanes_of
from trainer.model.stages import Stage
from trainer.optimizers.adamw import STATE_NAMES, AdamW
from trainer.optimizers.encoded_adamw import EncodedAdamW
from trainer.options import EngineOptions
from trainer.pipeline.boundaries import OnDevice, OnHost, new_boundaries
from trainer.pipeline.footprint import PipelineSizes, resident_bytes, small_stages, spending
from trainer.pipeline.gradients import GradientBank
from trainer.pipeline.graphs import Passes
from trainer.pipeline.host_side import HostSide
from trainer.pipeline.measuring import Measures
from trainer.pipeline.peering import Peer, second_device
from trainer.pipeline.residents import Resident, new_resident
from trainer.pipeline.sealing import Sealer
from trainer.pipeline.shapes import StageShape, stage_shape
from trainer.pipeline.slots import Ring
from trainer.pipeline.staging import HostImages
from trainer.step_model import StepModel

# Steps that compile and record take more than the others. So the budget is filled with care first,
# and again when nothing but plain steps was measured.
FORGETTING_STEPS, FILLING_STEPS = (1, 4), (3, 6)


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSettings:
    """How the pipeline spends memory. None of it changes a bit.

    gradients: where they wait for the model's norm: `vram`, `host`, or nowhere (`recompute`), to be
        computed again in a step that is clipped.
    records_passes: record blocks' passes at the second step and replay them from there on.
    poison: fill slots with NaN when they are given back, to find what uses them too late.
    """

    sizes: PipelineSizes = field(default_factory=PipelineSizes)
    activations_on_host: bool = False
    gradients: str = "vram"
    vram_budget_bytes: int | None = None
    records_passes: bool = True
    poison: bool = False


class Pipeline:
    """The lasting part of the pipeline of one model on one device; `close` it before the stores."""

    def __init__(
        self, model: StepModel, settings: PipelineSettings, lanes: Lanes | None = None
    ) -> None:
        assert isinstance(model.optimizer, AdamW | EncodedAdamW)
        sizes = settings.sizes
        self.model = model
        self.settings = settings
        self.rule: AdamW | EncodedAdamW = model.optimizer
        second = second_device(model.options, model.device)
        self.lanes: Lanes = lanes or lanes_of(model.device, second)
        self.images = HostImages(self.lanes, model.device.page_locks)
        self.sealer = Sealer(self.lanes, in_background=not model.device.is_host)
        self.shapes = stage_shapes(model, sizes)
        self.peer = Peer(self.lanes, self.shapes, second) if second is not None else None
        self.host_side = HostSide(self.lanes, model, self.sealer, self.shapes)
        self.residents: dict[str, Resident] = {}
        self.keep_resident(small_stages(self.shapes))
        self.passes = Passes(self.lanes)
        self.clipped_last = True
        self.steps_done = 0
        device, dtype = model.device.torch_device, model.options.torch_dtype
        largest = max(shape.count for shape in self.shapes.values())
        image = max(shape.params.count for shape in self.shapes.values())
        tile = max(t.state_count for shape in self.shapes.values() for t in shape.tiles)
        state = next(iter(self.shapes.values())).state.dtype
        tied = 1 if model.tied else 0
        self.params = self._ring("parameters", sizes.params_slots, image)
        self.gradients = self._ring("gradients", sizes.gradient_slots + tied, largest)
        self.tiles = self._ring("state", sizes.tile_slots, tile, state)
        self.weights: Tensor = torch.empty(self._weights_count(), dtype=dtype, device=device)
        self.step_number: Tensor = torch.zeros((), device=device)
        self.told: Tensor | None = None
        if not model.device.is_host:
            size = 8 * (3 + 2 * len(self.shapes) + 1)
            self.told = model.device.host_buffer(size, "norms").view(torch.float64)
        self.bank = (
            None
            if settings.gradients == "recompute"
            else GradientBank(self.lanes, model.device, on_host=settings.gradients == "host")
        )
        self.boundaries: OnDevice | OnHost = new_boundaries(
            self.lanes,
            model.device,
            on_host=settings.activations_on_host,
            slots=sizes.boundary_slots,
            poison=settings.poison,
        )

    def _ring(self, name: str, slots: int, count: int, dtype: torch.dtype = torch.float32) -> Ring:
        return Ring(
            self.lanes,
            name=name,
            slots=slots,
            count=count,
            dtype=dtype,
            device=self.model.device.torch_device,
            poison=self.settings.poison,
        )

    def _weights_count(self) -> int:
        """Elements of the largest stage that computes with a cast copy."""
        stages: list[Stage] = [*self.model.trunk, self.model.head]
        return max(self.shapes[s.name].count for s in stages if not s.keeps_master_dtype)

    def weights_of(self, stage: Stage, buffer: Tensor) -> dict[str, Tensor]:
        """Give a stage's parameters, which lie in `buffer`, as it computes with them.

        Every stage that needs another type has them in the same place: the one before is gone.
        """
        shape = self.shapes[stage.name]
        if stage.keeps_master_dtype:
            return shape.image_views(buffer)
        if shape.is_aligned:
            count = shape.params.count
            self.weights[:count].copy_(buffer[:count])
            return shape.views(self.weights)
        cast = shape.views(self.weights)
        for name, tensor in shape.image_views(buffer).items():
            cast[name].copy_(tensor)
        return cast

    def count_step(self) -> None:
        """Count a step that was made; after the first, which compiles, passes may be recorded."""
        self.steps_done += 1
        if self.steps_done == 1:
            self.passes.may_record = self.settings.records_passes
        if self.settings.vram_budget_bytes is not None:
            if self.steps_done in FORGETTING_STEPS:
                self.model.device.forget_peak()
            elif self.steps_done in FILLING_STEPS:
                self.fill_budget()

    def new_measures(self, max_norm: float) -> Measures:
        """Give what a step measures into."""
        return Measures(max_norm, self.told)

    def reset(self) -> None:
        """Be ready for another step after one that did not come to its end.

        Every copy is waited for, so that the store may have its images back.
        """
        self.sealer.abandon()
        self._wait()
        for ring in (self.params, self.gradients, self.tiles):
            ring.reset()
        self.boundaries.reset()
        for resident in self.residents.values():
            resident.step = None

    def _wait(self) -> None:
        self.model.device.wait()
        if self.peer is not None:
            self.peer.settle()

    def forget_begun(self) -> None:
        """Take back the slots of a step that was begun, and of nothing else."""
        self._wait()
        self.params.reset()
        self.gradients.reset()
        self.boundaries.reset()

    def fill_budget(self) -> None:
        """After a measured step: spend what the budget has room for, see `footprint.spending`.

        The first time, some of it is left for slots, which are worth more than what they replace;
        they come when nothing but plain steps was measured.
        """
        budget, sizes = self.settings.vram_budget_bytes, self.settings.sizes
        if budget is None:
            return
        spare = budget - self.model.device.peak_bytes() - sizes.margin_bytes
        always = small_stages(self.shapes)
        kept = sum(resident_bytes(self.shapes[n]) for n in self.residents if n not in always)
        slot = self.boundaries.slot_bytes
        chosen = spending(self.shapes, sizes, spare + kept, boundary_bytes=slot)
        spare -= chosen.slot_bytes
        if self.steps_done == FILLING_STEPS[-1] and spare >= 0:
            if chosen.more_boundaries:
                self.boundaries.grow(sizes.more_boundary_slots)
            self.tiles.grow(sizes.tile_slots + chosen.more_tiles)
            if chosen.more_gradients:
                self.gradients.grow(sizes.more_gradient_slots + (1 if self.model.tied else 0))
        for name in chosen.stages:
            needed = resident_bytes(self.shapes[name])
            if name not in self.residents and needed <= spare:
                self.keep_resident([name])
                spare -= needed

    def keep_resident(self, names: Sequence[str]) -> None:
        """Let these stages stay on the device."""
        for name in names:
            if name in self.host_side:
                continue
            shape = self.shapes[name]
            self.residents[name] = new_resident(shape, self.model.device.torch_device)

    def close(self) -> None:
        """Wait for the device and let go of what belongs to the stores."""
        self._wait()
        self.sealer.close()
        self.images.close()


def stage_shapes(model: StepModel, sizes: PipelineSizes) -> dict[str, StageShape]:
    """Lay out every stage that owns shards."""
    return {
        stage.name: stage_shape(
            stage.specs,
            model.optimizer.state_specs(stage.specs),
            STATE_NAMES,
            sizes.tile_elements,
        )
        for stage in model.owners()
    }


def is_supported(options: EngineOptions) -> bool:
    """Say whether the pipeline can do these steps; the others take the plain way."""
    return (
        options.optimizer == "adamw"
        and options.optimizer_state_dtype in ("fp32", "bf16")
        and options.master_weight_dtype == "fp32"
        and options.dtype in ("bf16", "fp32")
        and options.activations == "recompute"
        and options.activation_placement in ("vram", "host")
        and not options.timing_sync_cuda
        and not options.records_apart
    )
