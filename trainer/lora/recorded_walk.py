"""What recordings of passes hold of a device, on tensors without content.

Owns the sum: the memory that recordings compute in, which is theirs from then on, their places, the
place of unpacked weights, and a workspace of the stream that records. Knows nothing of steps: what
phases hold without recordings is given. Invariant: never less than a device was seen to take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.device import Device
from trainer.gradients import GradientSum
from trainer.lora import compiled_head
from trainer.lora.compiled_walk import WalkedBlocks
from trainer.lora.feeding import HEAD
from trainer.lora.ledger_tape import tape_of
from trainer.lora.model import brought_bytes
from trainer.lora.recorded import is_worth_recording
from trainer.lora.slots import Lease
from trainer.lora.stages import AdaptedStage, adapted, leased
from trainer.lora.unpacked import unpacked_form
from trainer.model.adapter_settings import LoraSettings
from trainer.model.stages import Block, build_head
from trainer.tape import Compute
from trainer.timing import StepClock
from trainer.vram import StepShape
from trainer.vram_trace import META, FusedAttention, MemoryTrace

# cuBLAS keeps one for each stream that it computes in, and for each thread: recordings have a
# stream, and where nothing goes through autograd its thread has none.
WORKSPACE_BYTES = 32 << 20
# What was seen is what is walked through, or some KiB less; attention in parts may hold more.
MARGIN_BYTES = 1 << 20
FORWARD, BACKWARD = "forward block", "backward block"
BEHIND_HEAD = ("backward", "update")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    """Bytes.

    recorded: what recordings compute in. forward, backward: what passes without them do. given:
    what comes out of the first pass. places: of inputs, outputs and adapters. unpacked, kept: of a
    block's weights, for a visit as they come, and in one place. head: what goes into that place.
    """

    recorded: int
    forward: int
    backward: int
    given: int
    places: int
    unpacked: int
    kept: int
    head: int


def with_recordings(
    phases: Mapping[str, int],
    shape: StepShape,
    lora: LoraSettings,
    trace_of: Callable[[], MemoryTrace],
) -> dict[str, int]:
    """Give what the phases of a device's step hold with recordings, where they are made."""
    block = Block(replace(shape.model, num_layers=1), 0)
    tokens = shape.micro_batch_size * shape.seq_len
    if not shape.options.compile_blocks or not is_worth_recording(block, tokens):
        return dict(phases)
    held = _Walk(adapted(block, lora), shape, trace_of()).held()
    lasting = held.recorded + MARGIN_BYTES + held.places + held.kept
    if not compiled_head.takes(build_head(shape.model)):
        lasting += WORKSPACE_BYTES
    found = {phase: size + lasting for phase, size in phases.items()}
    for phase in found:
        if not phase.startswith(BEHIND_HEAD):
            found[phase] -= held.head
    # There they are instead of what a pass computes in and unpacks to.
    found[FORWARD] += held.given - held.forward - held.unpacked
    found[BACKWARD] += held.given - held.backward - held.unpacked
    return found


class _Walk:
    """One micro-batch through one block, without recordings and as it is recorded."""

    def __init__(self, stage: AdaptedStage, shape: StepShape, trace: MemoryTrace) -> None:
        self._stage = stage
        self._head = adapted(build_head(shape.model), stage.lora)
        self._trace = trace
        self._dtype = shape.options.torch_dtype
        self._kept = shape.options.activations
        self._blocks = WalkedBlocks(is_host=False)
        form = (shape.micro_batch_size, shape.seq_len, shape.model.hidden_size)
        with trace, trace.left_out():
            self._x, self._gradient = (self._empty(form, self._dtype) for _ in range(2))
            self._leaves = {
                name: self._empty(each.shape, torch.float32)
                for name, each in stage.parameters.items()
            }
            self._weights = self._unpacked()

    def held(self) -> _Held:
        """Give what there is to count."""
        with self._trace, FusedAttention():
            with leased(self._stage, Lease(self._weights, None)):
                recorded, given = self._as_recorded()
                forward, backward = self._as_it_is()
            both = [*self._leaves.values(), *self._leaves.values()]
            places = self._counted(lambda: [torch.empty_like(t) for t in (self._x, *both)])
            unpacked = kept = head = 0
            if self._stage.is_packed and self._dtype == torch.bfloat16:
                _, size = unpacked_form(self._stage, self._dtype)
                unpacked = self._counted(lambda: [*self._unpacked().values()])
                kept = self._counted(lambda: [self._empty((size,), torch.uint8)])
                brought = brought_bytes(self._head, self._dtype)
                if self._head.name == HEAD and brought <= size:
                    head = self._counted(lambda: [self._empty((brought,), torch.uint8)])
        # As much as comes out of the first pass has a place.
        return _Held(
            recorded=recorded,
            forward=forward,
            backward=backward,
            given=given,
            places=places + given,
            unpacked=unpacked,
            kept=kept,
            head=head,
        )

    def _as_recorded(self) -> tuple[int, int]:
        left: list[Tensor] | None = [] if self._kept == "attention" else None
        call = self._blocks.call(self._stage, self._leaves, self._x)
        with torch.no_grad():
            with self._trace.phase("first pass"):
                output = call.forward(self._x, left)
            given = self._trace.live_bytes
            del output
            before = self._trace.live_bytes
            with self._trace.phase("way back"):
                call.back(self._x, self._gradient, left)
        peaks = self._trace.peaks
        return max(peaks["first pass"], peaks["way back"] - before), given

    def _as_it_is(self) -> tuple[int, int]:
        compute = Compute(
            device=Device(META), dtype=self._dtype, clock=StepClock(), blocks=self._blocks
        )
        before = self._trace.live_bytes
        with self._trace.phase(FORWARD):
            given = (self._stage, compute, self._leaves, [self._x])
            tape = tape_of(*given, activations=self._kept)
        tape.outputs.clear()
        left = self._trace.live_bytes
        with self._stage.binding.replaying(), self._trace.phase(BACKWARD):
            tape.backward(self._leaves, [self._gradient], GradientSum())
        return self._trace.peaks[FORWARD] - before, self._trace.peaks[BACKWARD] - left

    def _counted(self, make: Callable[[], list[Tensor]]) -> int:
        before = self._trace.live_bytes
        made = make()
        found = self._trace.live_bytes - before
        made.clear()
        return found

    def _unpacked(self) -> dict[str, Tensor]:
        parameters = self._stage.inner.parameters
        return {name: self._empty(each.shape, self._dtype) for name, each in parameters.items()}

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)
