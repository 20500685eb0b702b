"""How much memory the pipeline's steps hold at their fullest moment, of a GPU or of a CPU.

Owns the walk: the pipeline's own code, from its slots to the clipped update, runs on tensors
without content (`trainer.vram_trace`). What a recorded pass uses inside is nobody else's from then
on, so it counts beside the fullest moment, as `trainer.device_lanes` counts it. Knows nothing of
stores or of what is free. Invariant: nothing is allocated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import count
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from shardb import layout
from shardb.views import StagedShard, TensorImage
from trainer.device import Device
from trainer.device_lanes import HostLanes, Lane
from trainer.host_walk import SCALARS_BYTES
from trainer.model.stages import build_head, build_trunk
from trainer.optimizers.adamw import AdamW
from trainer.optimizers.encoded_adamw import EncodedAdamW
from trainer.pipeline.course import PipelineCourse, Rows
from trainer.pipeline.footprint import (
    Spending,
    boundary_growth_bytes,
    growth_bytes,
    resident_bytes,
    small_stages,
    spending,
)
from trainer.pipeline.measuring import Measures, Told
from trainer.pipeline.pipeline import Pipeline, PipelineSettings, stage_shapes
from trainer.pipeline.shapes import ImageShape
from trainer.pipeline.staging import HostImages
from trainer.placement_places import ActivationPlaces
from trainer.step import StepOrder
from trainer.step_model import StepModel
from trainer.tokens import Tokens
from trainer.vram import (
    LEFT_OUT_BYTES,
    WORKSPACE_BYTES,
    StepShape,
    carried_on,
    make_tables,
    table_bytes,
)
from trainer.vram_trace import META, FusedAttention, FusedKernel, HostAttention, MemoryTrace

T = TypeVar("T")
# The first step's updates wait for the norm; the second one's are made at once; the third one's
# too, and again because it is clipped.
CLIPPED = (False, False, True)
RECORDING = "recording"
COMPILED_PHASES = ("forward block", "backward block")
# A recorded block that is compiled uses so much of what PyTorch's own kernels would: on an H200
# between 0.599 and 0.627, over three shapes.
COMPILED_SHARE = 0.63
# Recordings compute in a stream of their own, for which cuBLAS keeps its buffers a second time.
RECORDED_WORKSPACE_BYTES = 2 * WORKSPACE_BYTES
# What compiled blocks hold beside what PyTorch's own kernels do: on an H200 up to 4.3 MB of fp32.
COMPILED_BYTES = 6 << 20
EVERY_NUMBER = re.compile(r"[_ ]\d+$")


def predicted_pipeline_phases(
    shape: StepShape, settings: PipelineSettings, *, is_host: bool
) -> dict[str, int]:
    """Give the most bytes that each phase holds, residents of a budget aside."""
    walked = partial(_walked, settings=replace(settings, vram_budget_bytes=None), is_host=is_host)
    # With fewer blocks than slots for them nothing comes and goes as it does with many.
    blocks_walked = settings.sizes.params_slots + 2
    layers = shape.model.num_layers
    phases = carried_on(shape, layers, shape.accumulation, walked, blocks_walked)
    if is_host:
        lasting = SCALARS_BYTES
    else:
        # As beside a step of the plain way: on an H200 the prediction is then from 2.2 to 11.5 MB
        # above what steps took, over the grid of `tools/bench/vram_grid.py`.
        lasting = LEFT_OUT_BYTES + table_bytes(shape)
        lasting += COMPILED_BYTES if shape.options.compile_blocks else 0
        lasting += RECORDED_WORKSPACE_BYTES if settings.records_passes else WORKSPACE_BYTES
    return {phase: held + lasting for phase, held in phases.items()}


def predicted_spending(
    shape: StepShape, settings: PipelineSettings, spare_bytes: int
) -> tuple[tuple[str, ...], Spending, int]:
    """Name all stages, say what spare memory will be spent on, and what it could be at most."""
    shapes, slot = stage_shapes(_model(shape, Device(META)), settings.sizes), 0
    if settings.activations_on_host:
        items = shape.micro_batch_size * shape.seq_len * shape.model.hidden_size
        slot = items * shape.options.torch_dtype.itemsize
    spent = spending(shapes, settings.sizes, spare_bytes, boundary_bytes=slot)
    always = small_stages(shapes)
    most = boundary_growth_bytes(settings.sizes, slot)
    most += sum(resident_bytes(shapes[name]) for name in shapes if name not in always)
    if len(spent.stages) < len(shapes):
        most += sum(growth_bytes([*shapes.values()], settings.sizes))
    return tuple(shapes), spent, most


@lru_cache(maxsize=1024)
def _walked(
    shape: StepShape, blocks: int, *, settings: PipelineSettings, is_host: bool
) -> Mapping[str, int]:
    shape = replace(shape, model=replace(shape.model, num_layers=blocks))
    make_tables(shape)
    trace = MemoryTrace(block_bytes=int) if is_host else MemoryTrace()
    kernels = (HostAttention(),) if is_host else (FusedAttention(), _FusedNorm())
    with ExitStack() as stack:
        for each in (trace, *kernels):
            stack.enter_context(each)
        walk = _Walk(shape, settings, trace, is_host=is_host)
        first = walk.step(1)
        others = [walk.step(number) for number in range(2, len(CLIPPED) + 1)]
    found: dict[str, int] = dict(first)
    if walk.lanes.captured_bytes and shape.options.compile_blocks:
        # Before they are recorded, blocks use as much inside, and there is nothing beside it.
        for phase in COMPILED_PHASES:
            del found[phase]
    for peaks in others:
        for phase, held in peaks.items():
            inside = 0 if phase == RECORDING else walk.lanes.captured_bytes
            found[phase] = max(found.get(phase, 0), held + inside)
    return found


class _FusedNorm(FusedKernel):
    """A CUDA device's kernel of the norm."""

    def in_place_of(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """See `FusedKernel`."""
        if func is F.rms_norm and kwargs.get("weight") is None:
            return _Norm.apply(args[0])  # type: ignore[no-untyped-call]
        return None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.new_empty(*x.shape[:-1], 1))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> Tensor:
        inside = torch.empty_like(ctx.saved_tensors[0])  # as measured on an H200
        found = torch.empty_like(inside)
        del inside
        return found


class _Walk:
    """Steps of a shape through the pipeline, one after the other."""

    def __init__(
        self, shape: StepShape, settings: PipelineSettings, trace: MemoryTrace, *, is_host: bool
    ) -> None:
        self._trace = trace
        self._shape = shape
        self._is_host = is_host
        self.lanes = _WalkedLanes(
            trace,
            records=settings.records_passes and not is_host,
            block_share=COMPILED_SHARE if shape.options.compile_blocks else 1.0,
        )
        with trace.phase("slots"):
            self._pipeline = _WalkedPipeline(shape, settings, self.lanes, is_host=is_host)
        self._course = PipelineCourse(self._pipeline, self._tokens)
        self._rows: list[Rows] = [[] for _ in range(len(CLIPPED) + 2)]
        self._store = _Store(self._pipeline)

    def step(self, number: int) -> dict[str, int]:
        """Make one step; give what its phases hold."""
        self._trace.peaks = {}
        self._pipeline.clips = CLIPPED[number - 1]
        order = StepOrder(step=number, learning_rate=1e-3)
        rows, following = self._rows[number], self._rows[number + 1]
        # A step asks of a transaction what this one has.
        txn: Any = self._store
        self._course.train(txn, order, rows, lambda: following)
        self._store.commit()
        return self._trace.peaks

    def _tokens(self, _rows: Rows) -> list[Tokens]:
        shape = self._shape
        with self._trace.left_out() if self._is_host else nullcontext():  # numpy's, on a host
            return [
                Tokens(ids=_ids(shape), labels=_ids(shape), valid_count=1)
                for _ in range(shape.accumulation)
            ]


class _WalkedLanes(HostLanes):
    """Lanes whose named work is a phase, and whose recordings tell what they use inside."""

    def __init__(self, trace: MemoryTrace, *, records: bool, block_share: float) -> None:
        super().__init__()
        self._memory = trace
        self._records = records
        self._block_share = block_share
        self.captured_bytes = 0

    @contextmanager
    def on(self, lane: Lane, name: str = "") -> Iterator[None]:
        phase = self._memory.phase(EVERY_NUMBER.sub("", name)) if name else nullcontext()
        with phase:
            yield

    def capture(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]] | None:
        if not self._records:
            return None
        before, peaks = self._memory.live_bytes, self._memory.peaks
        outer, highest = self._memory.current, peaks.pop(RECORDING, 0)
        with self._memory.phase(RECORDING):
            result = work()
        inside = peaks[RECORDING] - self._memory.live_bytes
        # Blocks alone are compiled.
        share = self._block_share if outer in COMPILED_PHASES else 1.0
        self.captured_bytes = max(self.captured_bytes, int(share * inside))
        peaks[RECORDING] = max(highest, self._memory.live_bytes + self.captured_bytes)
        assert self._memory.live_bytes >= before
        return result, _again


class _WalkedPipeline(Pipeline):
    """The pipeline on tensors without content; `clips` says what the host is told of a norm."""

    def __init__(
        self,
        shape: StepShape,
        settings: PipelineSettings,
        lanes: _WalkedLanes,
        *,
        is_host: bool,
    ) -> None:
        self.clips = False
        device = _WalkedDevice(lanes._memory, is_host=is_host)
        super().__init__(_model(shape, device), settings, lanes)
        self.images = _WalkedImages(lanes._memory, self)
        self.rule = _without_kernel(self.rule)

    def new_measures(self, max_norm: float) -> Measures:
        return _WalkedMeasures(max_norm, clips=self.clips)


class _WalkedMeasures(Measures):
    def __init__(self, max_norm: float, *, clips: bool) -> None:
        super().__init__(max_norm, None)
        self._clips = clips

    def read(self, names: Sequence[str], lanes: Any) -> Told:
        return Told(
            is_finite=True,
            loss_sum=1.0,
            norm=1.0,
            scale=0.5 if self._clips else 1.0,
            shard_norms=dict.fromkeys(names, 1.0),
        )


class _InPlace(AdamW):
    """The rule: its kernel works in place and holds nothing."""

    def apply(self, *_tensors: Any, **_numbers: Any) -> None:
        """Nothing is held."""


def _without_kernel(rule: AdamW | EncodedAdamW) -> AdamW | EncodedAdamW:
    """Give a rule whose kernel holds nothing; what it takes around it stays."""
    if isinstance(rule, EncodedAdamW):
        return replace(rule, inner=_InPlace(**asdict(rule.inner)))
    return _InPlace(**asdict(rule))


class _WalkedDevice(Device):
    """A device without content. Copies to a host's memory are left out, unless it is the host."""

    is_host = True  # its lanes are the host's: everything is done when a call returns

    def __init__(self, trace: MemoryTrace, *, is_host: bool) -> None:
        super().__init__(META)
        self._trace = trace
        self._counts = is_host

    def host_buffer(self, size: int, what: str) -> Tensor:
        with nullcontext() if self._counts else self._trace.left_out():
            return torch.empty(size, dtype=torch.uint8, device=META)


class _WalkedImages(HostImages):
    """Images of shards, which are the store's memory."""

    def __init__(self, trace: MemoryTrace, pipeline: Pipeline) -> None:
        super().__init__(pipeline.lanes, pipeline.model.device.page_locks)
        self._trace = trace

    def elements(self, image: TensorImage, shape: ImageShape) -> Tensor:
        with self._trace.left_out():
            return torch.empty(shape.count, dtype=shape.dtype, device=META)

    def lock(self, staged: StagedShard) -> None:
        """Nothing is locked."""


@dataclass(frozen=True, eq=False)
class _Image:
    """A shard's image without bytes: a layout and an address."""

    name: str
    layout: layout.Layout
    address: int

    @property
    def image(self) -> _Image:
        return self

    @property
    def __array_interface__(self) -> dict[str, tuple[int, bool]]:
        return {"data": (self.address, False)}

    def filled(self, size_bytes: int) -> None:
        """It has no bytes."""

    def seal(self) -> None:
        """It has no bytes."""


class _Store:
    """A store and the transaction on it, of images without bytes."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._addresses = count(1)
        self._current: dict[str, _Image] = {}
        self._staged: dict[str, _Image] = {}
        for stage in pipeline.model.owners():
            states = pipeline.model.optimizer.state_specs(stage.specs)
            for name, specs in (("params", stage.specs), ("optim", states)):
                shard = f"{name}/{stage.name}"
                self._current[shard] = self._image(shard, layout.build(specs))

    def _image(self, name: str, placed: layout.Layout) -> _Image:
        return _Image(name, placed, next(self._addresses))

    def read(self, name: str) -> _Image:
        return self._current[name]

    def stage(self, name: str, like: _Image) -> _Image:
        self._staged[name] = self._image(name, like.layout)
        return self._staged[name]

    def discard(self, name: str) -> None:
        del self._staged[name]

    def commit(self) -> None:
        self._current, self._staged = self._staged, {}


def _model(shape: StepShape, device: Device) -> StepModel:
    """Give the model; compiled blocks hold at most what the plain ones do."""
    return StepModel(
        trunk=build_trunk(shape.model),
        head=build_head(shape.model),
        tied=shape.model.tied_embeddings,
        options=shape.options,
        optimizer=shape.options.update_rule(),
        device=device,
        places=ActivationPlaces(shape.options, device),
    )


def _ids(shape: StepShape) -> Tensor:
    return torch.empty(shape.micro_batch_size, shape.seq_len, dtype=torch.int64, device=META)


def _again() -> None:
    """What a recording would do again is done in buffers that are there."""
