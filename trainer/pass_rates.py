"""How long a block and the head take for a micro-batch, and an optimizer for a shard: measured.

Owns the measurements, made with the code that trains: the run's stages, its kernels (compiled and
recorded where a run's are), its rule. A block is timed at two numbers of rows, which gives what a
call costs and what a row adds; a size that would take too long is left to that line. Knows nothing
of stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from shardb import TensorSpec, torch_adaptor
from trainer.ceiling import shortest_seconds
from trainer.device import Device
from trainer.device_lanes import lanes_of
from trainer.gradients import PlacedSum
from trainer.model.compiled import CompiledBlocks
from trainer.model.stages import Stage, build_head, build_trunk
from trainer.optimizers.adamw import AdamW
from trainer.optimizers.tiles import ShardUpdate
from trainer.options import EngineOptions
from trainer.pipeline.graphs import HeadWork, Passes
from trainer.rates import PassSeconds
from trainer.tape import Compute
from trainer.timing import StepClock
from trainer.vram import StepShape

# A pass that is timed may take about so long, by the rate of matrix products.
PASS_SECONDS_MAX = 0.1
# Repeats of one timing end when so much time went by: others may use the machine.
TIMED_SECONDS = 0.4
# A pass takes about so much longer than its matrix products; only used to choose what is timed.
SLOWER_THAN_PRODUCTS = 3
HOST_ELEMENTS, DEVICE_ELEMENTS = 1 << 22, 1 << 24


@dataclass(frozen=True, kw_only=True, slots=True)
class PassTimes:
    """Of one block, with and without the pass that its backward pass computes again; of the head.

    head: forward and backward of a micro-batch.
    """

    forward: PassSeconds
    backward: PassSeconds
    head: PassSeconds


def pass_times(
    shape: StepShape, device: Device, matmul_flops: float, *, records: bool
) -> PassTimes:
    """Time passes of one micro-batch, of the largest that is quick enough and of one row.

    records: time recordings of passes where the device can record, as the pipeline does.
    """
    timer = _Passes(shape, device, records=records)
    rows_max = shape.micro_batch_size * shape.accumulation
    per_row = SLOWER_THAN_PRODUCTS * 6 * timer.block_elements * shape.seq_len / matmul_flops
    many = max(1, min(rows_max, int(PASS_SECONDS_MAX / per_row)))
    few = max(1, many // 4)
    found = {rows: timer.block(rows) for rows in {few, many}}
    head = timer.head(few)
    return PassTimes(
        forward=_line(few, found[few][0], many, found[many][0]),
        backward=_line(few, found[few][1], many, found[many][1]),
        head=PassSeconds(fixed=0.0, per_row=head / few),
    )


def _line(few: int, few_seconds: float, many: int, many_seconds: float) -> PassSeconds:
    """Give the line through two measurements; noise makes at most half of it a call's cost."""
    if few == many:
        return PassSeconds(fixed=0.0, per_row=many_seconds / many)
    per_row = max(many_seconds / many / 2, (many_seconds - few_seconds) / (many - few))
    return PassSeconds(fixed=max(0.0, many_seconds - per_row * many), per_row=per_row)


class _Passes:
    """One block and the head, with weights, ready to be passed."""

    def __init__(self, shape: StepShape, device: Device, *, records: bool) -> None:
        self._shape = shape
        self._device = device
        # One for all: recordings share a pool of memory, which goes with the last of them.
        self._passes = Passes(lanes_of(device))
        self._records = records
        self._block = build_trunk(shape.model)[1]
        self._head = build_head(shape.model)
        options = shape.options
        self._compute = Compute(
            device=device,
            dtype=options.torch_dtype,
            clock=StepClock(),
            blocks=CompiledBlocks() if options.compile_blocks else None,
        )

    @property
    def block_elements(self) -> int:
        """Give how many parameters a block has."""
        return sum(spec.bytes // 4 for spec in self._block.specs.values())

    def block(self, rows: int) -> tuple[float, float]:
        """Give the seconds of a forward pass, and of a backward pass that computes it again."""
        weights, total = self._weights(self._block), self._sum(self._block)
        x, gradient = self._hidden(rows), self._hidden(rows)
        passes = self._passes

        def forward() -> Tensor:
            return passes.forward(self._compute, self._block, weights, x)

        def backward() -> Tensor:
            return passes.backward(self._compute, self._block, weights, x, gradient, total)

        with self._recording_after(forward, backward):  # both compile where blocks are compiled
            return self._timed(forward), self._timed(backward)

    def head(self, rows: int) -> float:
        """Give the seconds of the head and its backward pass."""
        weights, total = self._weights(self._head), self._sum(self._head)
        labels = torch.zeros(
            rows, self._shape.seq_len, dtype=torch.int64, device=self._device.torch_device
        )
        x, passes = self._hidden(rows), self._passes
        work = HeadWork(
            stage=self._head,
            valid_tokens=labels.numel(),
            chunk_tokens=self._shape.options.lm_head_chunk_tokens,
        )

        def run() -> None:
            passes.head(work, weights, [x], [labels], total)

        with self._recording_after(run):
            return self._timed(run)

    @contextmanager
    def _recording_after(self, *works: Callable[[], object]) -> Iterator[None]:
        """Do some work as it is, then record it at its next call, as steps do."""
        for work in works:
            work()
        self._passes.may_record = self._records
        yield
        self._passes.may_record = False

    def _timed(self, work: Callable[[], object]) -> float:
        return shortest_seconds(work, self._device, limit_seconds=TIMED_SECONDS)

    def _weights(self, stage: Stage) -> dict[str, Tensor]:
        options = self._shape.options
        dtype = torch.float32 if stage.keeps_master_dtype else options.torch_dtype
        return {
            name: torch.full(p.shape, 0.01, dtype=dtype, device=self._device.torch_device)
            for name, p in stage.parameters.items()
        }

    def _sum(self, stage: Stage) -> PlacedSum:
        return PlacedSum(
            {
                name: torch.zeros(p.shape, device=self._device.torch_device)
                for name, p in stage.parameters.items()
            }
        )

    def _hidden(self, rows: int) -> Tensor:
        shape, dtype = self._shape, self._shape.options.torch_dtype
        size = (rows, shape.seq_len, shape.model.hidden_size)
        return torch.full(size, 0.5, dtype=dtype, device=self._device.torch_device)


def update_rate(options: EngineOptions, device: Device, *, in_place: bool = False) -> float:
    """Give the parameters a second that the rule updates on a device.

    in_place: of AdamW on tensors that are there, as the pipeline updates.
    """
    rule = options.update_rule()
    count = HOST_ELEMENTS if device.is_host else DEVICE_ELEMENTS
    if in_place and isinstance(rule, AdamW):
        values, gradient, *moments = (
            torch.zeros(count, device=device.torch_device) for _ in range(4)
        )
        step = torch.ones((), device=device.torch_device)

        def work() -> None:
            rule.apply(
                [values],
                [gradient],
                [[moment] for moment in moments],
                decayed=[True],
                step=step,
                learning_rate=0.0,
            )

        return count / shortest_seconds(work, device, limit_seconds=TIMED_SECONDS)
    side = 1 << 10
    specs = {"w": TensorSpec(dtype="F32", shape=(count // side, side))}
    old, new = _images(specs), _images(specs)
    state, new_state = (_images(rule.state_specs(specs)) for _ in range(2))
    shard = ShardUpdate(
        params=old,
        state=state,
        new_params=new,
        new_state=new_state,
        gradients={"w": torch.zeros(count // side, side, device=device.torch_device)},
        gradient_scale=1.0,
        learning_rate=0.0,
        step=1,
        name="w",
    )

    def update() -> None:
        rule.update(device, shard)

    return count / shortest_seconds(update, device, limit_seconds=TIMED_SECONDS)


def _images(specs: dict[str, TensorSpec]) -> dict[str, Tensor]:
    return {
        name: torch.zeros(spec.shape, dtype=torch_adaptor.DTYPES[spec.dtype])
        for name, spec in specs.items()
    }
