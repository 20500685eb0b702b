"""Lanes of a device: work that is asked for in one lane runs beside that of the others.

Owns streams, events and the page-locking of host memory; beside `trainer.device` the only module
that touches `torch.cuda`. Knows nothing of what runs in a lane. Invariants: work in one lane runs
in the order in which it was asked for; between lanes only a mark orders it. On the host everything
is done when the call returns, so marks say nothing there.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from trainer.device import Device

T = TypeVar("T")


class Lane(StrEnum):
    """What runs where. COMPUTE is the lane of everything that names none."""

    COMPUTE = "compute"
    TOKENS_IN = "tokens in"
    PARAMS_IN = "parameters in"
    STATE_IN = "state in"
    ACTIVATIONS_IN = "activations in"
    UPDATE = "update"
    OUT = "out"
    OUT_LATER = "out, when there is room"
    TOLD = "told"
    PEER_IN = "in, to the second device"
    PEER_OUT = "from the second device"


class Mark(Protocol):
    """A point in a lane that others can wait for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A piece of a lane's work, in seconds since the trace began."""

    lane: str
    name: str
    began: float
    ended: float


class Lanes(Protocol):
    """The lanes of one device."""

    def on(self, lane: Lane, name: str = "") -> AbstractContextManager[None]:
        """Ask for the work inside the block in a lane; `name` is what a trace calls it."""
        ...

    def mark(self, lane: Lane, *, for_host: bool = False) -> Mark | None:
        """Give the point that a lane has reached when all that was asked for so far is done."""
        ...

    def wait(self, lane: Lane, mark: Mark | None) -> None:
        """Let a lane go on only behind a mark of another."""
        ...

    def arrive(self, mark: Mark | None) -> None:
        """Return when a mark is reached."""
        ...

    def hold(self, tensor: Tensor, lane: Lane) -> None:
        """Keep a tensor's memory until what a lane was asked for so far is done."""
        ...

    def page_lock(self, address: int, size_bytes: int) -> bool:
        """Let the device copy host memory without the host; False where it cannot be."""
        ...

    def page_unlock(self, address: int) -> None:
        """Take `page_lock` back, before the memory is given up."""
        ...

    def capture(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]] | None:
        """Record what `work` asks for in COMPUTE; give its result and what does it all again.

        Everything it touches keeps its address. None where nothing can be recorded.
        """
        ...

    def begin_trace(self) -> None:
        """Note the spans of named work from here on."""
        ...

    def take_trace(self) -> list[Span]:
        """Wait for all lanes; give the spans noted so far, and note no more."""
        ...


PEER_LANES = (Lane.PEER_IN, Lane.PEER_OUT)


def lanes_of(device: Device, second: Device | None = None) -> Lanes:
    """Open the lanes of a device; those of a second one are its own."""
    return HostLanes() if device.is_host else CudaLanes(device, second)


class HostLanes:
    """The host: one thing after the other."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._spans: list[Span] = []

    @contextmanager
    def on(self, lane: Lane, name: str = "") -> Iterator[None]:
        began = time.perf_counter()
        yield
        if self._began is not None and name:
            ended = time.perf_counter() - self._began
            span = Span(lane=lane, name=name, began=began - self._began, ended=ended)
            self._spans.append(span)

    def mark(self, lane: Lane, *, for_host: bool = False) -> Mark | None:
        return None

    def wait(self, lane: Lane, mark: Mark | None) -> None:
        """It is done already."""

    def arrive(self, mark: Mark | None) -> None:
        """It is done already."""

    def hold(self, tensor: Tensor, lane: Lane) -> None:
        """Nothing runs behind the caller's back."""

    def page_lock(self, address: int, size_bytes: int) -> bool:
        return False

    def page_unlock(self, address: int) -> None:
        raise AssertionError("nothing is page-locked on the host")

    def capture(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]] | None:
        return None

    def begin_trace(self) -> None:
        self._began = time.perf_counter()

    def take_trace(self) -> list[Span]:
        spans, self._spans, self._began = self._spans, [], None
        return spans


@dataclass(kw_only=True)
class _Timed:
    lane: Lane
    name: str
    began: torch.cuda.Event
    ended: torch.cuda.Event


@dataclass(kw_only=True)
class _Trace:
    zero: torch.cuda.Event
    timed: list[_Timed] = field(default_factory=list)


class CudaLanes:
    """Streams of a CUDA device; COMPUTE is the stream of every call without lanes."""

    def __init__(self, place: Device, second: Device | None = None) -> None:
        self._place = place
        self._device = device = place.torch_device
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._pool: Any = None
        self._trace: _Trace | None = None
        self._streams: dict[Lane, torch.cuda.Stream] = {
            lane: torch.cuda.current_stream(device)
            if lane is Lane.COMPUTE
            else torch.cuda.Stream(  # type: ignore[no-untyped-call]
                second.torch_device if second is not None and lane in PEER_LANES else device
            )
            for lane in Lane
        }

    def on(self, lane: Lane, name: str = "") -> AbstractContextManager[None]:
        if self._trace is not None and name:
            return self._timed(self._trace, lane, name)
        if lane is Lane.COMPUTE:
            return nullcontext()
        return torch.cuda.stream(self._streams[lane])

    @contextmanager
    def _timed(self, trace: _Trace, lane: Lane, name: str) -> Iterator[None]:
        stream = self._streams[lane]
        began, ended = _event(timing=True), _event(timing=True)
        with torch.cuda.stream(stream):
            began.record(stream)
            yield
            ended.record(stream)
        trace.timed.append(_Timed(lane=lane, name=name, began=began, ended=ended))

    def mark(self, lane: Lane, *, for_host: bool = False) -> Mark | None:
        # A host that waits for a blocking event sleeps; otherwise it would keep a core busy.
        event = _event(blocking=for_host)
        event.record(self._streams[lane])
        return event

    def wait(self, lane: Lane, mark: Mark | None) -> None:
        if mark is not None:
            assert isinstance(mark, torch.cuda.Event)
            self._streams[lane].wait_event(mark)

    def arrive(self, mark: Mark | None) -> None:
        if mark is not None:
            assert isinstance(mark, torch.cuda.Event)
            mark.synchronize()

    def hold(self, tensor: Tensor, lane: Lane) -> None:
        tensor.record_stream(self._streams[lane])

    def page_lock(self, address: int, size_bytes: int) -> bool:
        # 1 is cudaHostRegisterPortable: locked for every context of the process.
        code = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 1))  # type: ignore[no-untyped-call]
        return code == 0

    def page_unlock(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def capture(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]] | None:
        torch.cuda.synchronize(self._device)
        self._place.keep_peak()
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        graph = torch.cuda.CUDAGraph()
        stream = _recording_stream(self._device)
        if not self._graphs:
            self._pool = None  # it went with the last graph that used it
        with warnings.catch_warnings():
            # PyTorch only warns of a recording of nothing, which would leave old results in place.
            warnings.filterwarnings("error", message="The CUDA Graph is empty")
            # Graphs share one pool: they never run at once, so each may use what the other does.
            recording = torch.cuda.graph(
                graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
            )
            with _in_this_stream(self._device), recording:
                result = work()
        if self._pool is None:  # graphs go with these lanes, or before
            weakref.finalize(self, self._place.forget_captured).atexit = False
        self._graphs.add(graph)
        self._pool = graph.pool()
        taken = torch.cuda.max_memory_allocated(self._device) - before
        lasting = torch.cuda.memory_allocated(self._device) - before
        # What a graph uses inside is free in the allocator's eyes, and nobody else's all the same.
        self._place.captured_bytes = max(self._place.captured_bytes, taken - lasting)
        torch.cuda.reset_peak_memory_stats(self._device)
        return result, graph.replay

    def begin_trace(self) -> None:
        zero = _event(timing=True)
        torch.cuda.synchronize(self._device)
        zero.record(self._streams[Lane.COMPUTE])
        self._trace = _Trace(zero=zero)

    def take_trace(self) -> list[Span]:
        if self._trace is None:
            return []
        torch.cuda.synchronize(self._device)
        timed, zero = self._trace.timed, self._trace.zero
        self._trace = None
        return [
            Span(
                lane=each.lane,
                name=each.name,
                began=zero.elapsed_time(each.began) / 1e3,
                ended=zero.elapsed_time(each.ended) / 1e3,
            )
            for each in timed
        ]


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """Give the stream that records on a device: cuBLAS keeps 64 MiB for each one for ever."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _in_this_stream(device: torch.device) -> Iterator[None]:
    """Come back to the stream of before: a recording that failed leaves another one behind."""
    before = torch.cuda.current_stream(device)
    try:
        yield
    finally:
        torch.cuda.set_stream(before)


def _event(*, timing: bool = False, blocking: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timing, blocking=blocking)  # type: ignore[no-untyped-call]
