"""Where tensors are computed on: the only module that may touch `torch.cuda`.

Owns the way of bytes between a shard's image in host memory and the tensors that compute. Knows
nothing of stages, optimizers or transactions. Invariants: an image that was read is never written
to; after `write_back` returned and `wait` was called, a staged image holds the values.

On the CPU a tensor of a shard is the shard's own memory, without a copy, when it is 64-byte
aligned: matrix kernels may round differently on other alignments, and then two runs would differ.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardb import torch_adaptor
from shardb.views import TensorImage
from trainer.errors import InputError
from trainer.page_locks import PageLocks

ALIGNMENT_BYTES = 64
# Compute capability of Hopper; on others cuDNN was not measured.
TENSOR_COPIES = 9
EVENTS_MAX = 1_000_000
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sent:
    """Copies of a shard's tensors on a device, good once `copied` has happened."""

    tensors: Mapping[str, Tensor]
    copied: torch.cuda.Event


class Device:
    """One device for compute; host memory for everything else."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.page_locks = PageLocks()
        # What recorded work uses inside, which no count of tensors holds; see `device_lanes`.
        self.captured_bytes = 0
        self._peak_before = 0
        self._sent: weakref.WeakKeyDictionary[TensorImage, _Sent] = weakref.WeakKeyDictionary()

    @classmethod
    def from_name(cls, name: str) -> Device:
        """Open `cpu`, `cuda`, `cuda:N` or `auto`; InputError when it does not exist here."""
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        kind, _, index = name.partition(":")
        if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
            raise InputError(f"--device {name!r} is unknown: choose cpu, cuda, cuda:N or auto")
        if kind == "cpu":
            return cls(torch.device("cpu"))
        return cls(_open_cuda(name, int(index or 0)))

    @property
    def name(self) -> str:
        """Give the name that `from_name` understands."""
        return str(self.torch_device)

    @property
    def is_host(self) -> bool:
        """Say whether computing happens in host memory, so that nothing needs a copy."""
        return self.torch_device.type == "cpu"

    def bring_in(self, view: TensorImage, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Give the tensors of `view` for computing, in `dtype` or, with None, as stored.

        They must not be written to: they may be the store's own memory.
        """
        sent = self._sent.pop(view, None)
        if sent is not None:
            return self._take_sent(sent, dtype)
        return {name: self._bring(t, dtype) for name, t in torch_adaptor.tensors(view).items()}

    def open_ahead(self, prefetch: str) -> Callable[[TensorImage], None] | None:
        """Give what copies a shard ahead of its use: None for `cpu`, where reading it is enough.

        `gpu` copies to this device, `secondary-gpu` to the CUDA device after it. InputError when
        there is no such device.
        """
        if prefetch == "cpu":
            return None
        target = self._target_of(prefetch)
        stream = torch.cuda.Stream(target)  # type: ignore[no-untyped-call]

        def send(view: TensorImage) -> None:
            with torch.cuda.device(target), torch.cuda.stream(stream):
                tensors = {
                    name: tensor.to(target, non_blocking=True)
                    for name, tensor in torch_adaptor.tensors(view).items()
                }
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record(stream)
            self._sent[view] = _Sent(tensors=tensors, copied=copied)

        return send

    def _target_of(self, prefetch: str) -> torch.device:
        if self.is_host:
            raise InputError(
                f"--prefetch-shards {prefetch}: the run computes on the CPU: choose cpu or off, or"
                " a CUDA device with --device"
            )
        return self.torch_device if prefetch == "gpu" else self.second().torch_device

    def second(self) -> Device:
        """Give the CUDA device after this one; InputError where there is one alone."""
        count = torch.cuda.device_count()
        if count < 2:
            raise InputError(
                "--prefetch-shards secondary-gpu: there is one CUDA device here: choose gpu or cpu"
            )
        return Device(torch.device("cuda", ((self.torch_device.index or 0) + 1) % count))

    def _take_sent(self, sent: _Sent, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Move what was sent ahead to this device, in `dtype`, once its copying is done."""
        torch.cuda.current_stream(self.torch_device).wait_event(sent.copied)
        found = {}
        for name, tensor in sent.tensors.items():
            # The allocator must not give the memory away while a stream of this thread reads it.
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
            found[name] = self._move(tensor).to(dtype or tensor.dtype)
        return found

    def tokens(self, ids: NDArray[np.integer]) -> Tensor:
        """Give token ids as int64 on the device."""
        return torch.from_numpy(ids.astype(np.int64)).to(self.torch_device)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Give `tensor` in host memory."""
        return tensor.to("cpu")

    def to_device(self, tensor: Tensor) -> Tensor:
        """Give `tensor` on the device: itself when it lies there."""
        return self._move(tensor)

    def host_buffer(self, size: int, what: str) -> Tensor:
        """Give `size` bytes of host memory, uint8; page-locked for a device where that is allowed.

        `what` names the use in the reason that `page_locks` keeps where it is not.
        """
        if self.is_host:
            return torch.empty(size, dtype=torch.uint8)
        owner = (ctypes.c_char * size).from_buffer(mmap.mmap(-1, size))
        buffer = torch.frombuffer(owner, dtype=torch.uint8)
        if self.page_locks.take(size, what):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            failed = int(runtime.cudaHostRegister(buffer.data_ptr(), size, 0))
            if failed:
                self.page_locks.give_back(
                    size,
                    f"{what}: the driver did not page-lock {size:,} bytes (error {failed}):"
                    " copies are slower",
                )
            else:
                unlock = weakref.finalize(
                    owner, _unlock_pages, self.page_locks, buffer.data_ptr(), size
                )
                # At the very end the driver may be gone before the memory is.
                unlock.atexit = False
        return buffer

    def open_tile(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Give writable copies of `sources`, and `gradients`, where the optimizer can compute.

        On the host the copies are the `targets` themselves.
        """
        if self.is_host:
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)
            return list(targets), list(gradients)
        return [self._move(source) for source in sources], [self._move(g) for g in gradients]

    def close_tile(self, computed: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Write what was computed on an opened tile into `targets`."""
        if self.is_host:
            return
        for value, target in zip(computed, targets, strict=True):
            target.copy_(value)

    def wait(self) -> None:
        """Return when everything that was started is done."""
        if not self.is_host:
            torch.cuda.synchronize(self.torch_device)

    def peak_bytes(self) -> int:
        """Give the most device memory that tensors held so far; 0 on the host."""
        if self.is_host:
            return 0
        now = torch.cuda.max_memory_allocated(self.torch_device) + self.captured_bytes
        return max(self._peak_before, now)

    def forget_captured(self) -> None:
        """Say that nothing is recorded any more."""
        self.captured_bytes = 0

    def keep_peak(self) -> None:
        """Remember the peak so far, because what counts it is about to begin anew."""
        self._peak_before = self.peak_bytes()

    def take_peak(self) -> tuple[int, int]:
        """Give the most that tensors took since this was last asked, and what they asked for.

        The allocator gives a tensor more than it asks for. `peak_bytes` is not disturbed.
        """
        stats = torch.cuda.memory_stats(self.torch_device)
        self.keep_peak()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        return stats["allocated_bytes.all.peak"], stats["requested_bytes.all.peak"]

    def record_allocations(self) -> Callable[[], list[dict[str, Any]]]:
        """Note every allocation from here on; what is given ends that, and gives its events."""
        memory = torch.cuda.memory
        memory._record_memory_history("all", "alloc", "all", EVENTS_MAX)

        def taken() -> list[dict[str, Any]]:
            traces = memory._snapshot()["device_traces"]
            memory._record_memory_history(None)
            found: list[dict[str, Any]] = traces[self.torch_device.index or 0]
            return found

        return taken

    def forget_peak(self) -> None:
        """Begin to measure `peak_bytes` anew, from what tensors hold now."""
        if not self.is_host:
            # There are no statistics before the device is first used.
            torch.cuda.init()  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()
            self._peak_before = 0
            torch.cuda.reset_peak_memory_stats(self.torch_device)

    def split_exactly(self) -> None:
        """Let the allocator give tensors what they ask for, in whole units of 512 bytes.

        As it is made, it leaves up to a MiB behind a tensor to it, how much depends on what was
        there before. Who has settings of his own in the environment keeps them.
        """
        if self.is_host or any(name in os.environ for name in ALLOCATOR_SETTINGS):
            return
        setting = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (setting or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")

    def drop_workspaces(self) -> None:
        """Give up what a device's library keeps for each thread and stream that multiplied."""
        if not self.is_host:
            torch.cuda.synchronize(self.torch_device)
            clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
            if clear is not None:
                clear()

    def limit_memory(self, limit_bytes: int) -> None:
        """Let tensors of this process take at most so much of the device; nothing on the host."""
        if not self.is_host:
            total = torch.cuda.get_device_properties(self.torch_device).total_memory
            share = min(1.0, limit_bytes / total)
            torch.cuda.set_per_process_memory_fraction(share, self.torch_device)

    def memory_bytes(self) -> tuple[int, int] | None:
        """Give free and total bytes of the device's memory; None on the host."""
        return None if self.is_host else torch.cuda.mem_get_info(self.torch_device)

    def _bring(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        if not self.is_host:
            return self._move(tensor).to(dtype or tensor.dtype)
        if dtype is not None and dtype != tensor.dtype:
            return tensor.to(dtype)
        return tensor if tensor.data_ptr() % ALIGNMENT_BYTES == 0 else tensor.clone()

    def _move(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.torch_device)


def stream_address(device: torch.device) -> int:
    """Give the stream that what is asked for now runs in, as other libraries take it."""
    address: int = torch.cuda.current_stream(device).cuda_stream
    return address


def has_tensor_copies(device: torch.device) -> bool:
    """Say whether a device copies tiles by itself, which cuDNN has kernels of attention for."""
    major: int = torch.cuda.get_device_capability(device)[0]
    has_cudnn: bool = torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
    return has_cudnn and major == TENSOR_COPIES


def _unlock_pages(page_locks: PageLocks, address: int, size: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
    page_locks.give_back(size)


def _open_cuda(name: str, index: int) -> torch.device:
    """Open a CUDA device, with kernels whose sums do not depend on the order of threads.

    Without them the backward passes of attention and of the embedding differ from run to run, and
    a resumed run from one never stopped. cuBLAS reads its variable when it is first used.
    Source: https://pytorch.org/docs/stable/notes/randomness.html
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if not torch.cuda.is_available():
        raise InputError(f"--device {name}: no CUDA device can be used here: choose cpu or auto")
    count = torch.cuda.device_count()
    if index >= count:
        raise InputError(f"--device {name}: there are {count} CUDA devices, numbered from 0")
    torch.use_deterministic_algorithms(True)
    # It also fills all memory that is not written yet, to find what reads it: a tenth of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # What asks for no device, a recording's stream or a host page to lock, must get this one.
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
