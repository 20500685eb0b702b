"""Where tensors are computed on: the only module that may touch `torch.cuda`.

Owns the way of bytes between a shard's image in host memory and the tensors that compute. Knows
nothing of stages, optimizers or transactions. Invariants: an image that was read is never written
to; after `write_back` returned and `wait` was called, a staged image holds the values.

On the CPU a tensor of a shard is the shard's own memory, without a copy, when it is 64-byte
aligned: matrix kernels may round differently on other alignments, and then two runs would differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardb import torch_adaptor
from shardb.views import TensorImage
from trainer.errors import InputError

ALIGNMENT_BYTES = 64


class Device:
    """One device for compute; host memory for everything else."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

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
        return {name: self._bring(t, dtype) for name, t in torch_adaptor.tensors(view).items()}

    def tokens(self, ids: NDArray[np.integer]) -> Tensor:
        """Give token ids as int64 on the device."""
        return torch.from_numpy(ids.astype(np.int64)).to(self.torch_device)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Give `tensor` in host memory."""
        return tensor.to("cpu")

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
        return 0 if self.is_host else torch.cuda.max_memory_allocated(self.torch_device)

    def _bring(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        if not self.is_host:
            return self._move(tensor).to(dtype or tensor.dtype)
        if dtype is not None and dtype != tensor.dtype:
            return tensor.to(dtype)
        return tensor if tensor.data_ptr() % ALIGNMENT_BYTES == 0 else tensor.clone()

    def _move(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.torch_device)


def _open_cuda(name: str, index: int) -> torch.device:
    if not torch.cuda.is_available():
        raise InputError(f"--device {name}: no CUDA device can be used here: choose cpu or auto")
    count = torch.cuda.device_count()
    if index >= count:
        raise InputError(f"--device {name}: there are {count} CUDA devices, numbered from 0")
    return torch.device("cuda", index)
