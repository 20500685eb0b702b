"""Many small tensors in one copy, through page-locked memory that is kept.

Owns buffers of host memory for adapters, their state, and rows of a table. A device takes longer to
begin a copy than to make one of this size, and waits for each that is not page-locked. Knows
nothing of stages. Invariant: a buffer is filled again only when the copy out of it is done; what a
device was asked to fill may be read behind a wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardb.views import TensorImage
from trainer.device import Device
from trainer.device_lanes import Lane, Lanes, Mark
from trainer.lora.forms import SlotForm
from trainer.lora.runs import Bodies, body_of

WHAT = "adapters"
ROWS = "rows of the embeddings"
THREADS = 4
# What is worth a thread's while.
SHARE_BYTES = 4 << 20


def copy_small(source: Tensor, target: Tensor) -> None:
    """Copy between tensors of host memory in this thread alone.

    Torch shares a copy of some ten thousand elements among threads, and waits for all of them: on
    a busy machine that takes a hundred times as long as the copy, for each of hundreds of tensors.
    """
    np.copyto(_bytes_of(target), _bytes_of(source))


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    flat: NDArray[np.uint8] = tensor.view(-1).view(torch.uint8).numpy()
    return flat


class _Buffer:
    """Host memory that grows to what is asked for; `copied` is behind the last copy out of it."""

    def __init__(self, device: Device, lanes: Lanes, what: str) -> None:
        self._device = device
        self._lanes = lanes
        self._what = what
        self._memory: Tensor | None = None
        self._copied: Mark | None = None

    def of(self, size: int) -> Tensor:
        """Give `size` bytes that may be written."""
        self._lanes.arrive(self._copied)
        if self._memory is None or self._memory.nbytes < size:
            self._memory = self._device.host_buffer(size, self._what)
        return self._memory[:size]

    def copied(self) -> None:
        """Say that COMPUTE was asked to copy what was written."""
        self._copied = self._lanes.mark(Lane.COMPUTE, for_host=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ahead:
    """Rows on the device that were looked up before they are asked for, and of which table."""

    digest: str
    ids: Tensor
    rows: Tensor


class SmallCopies:
    """Copies of small tensors to a device and back, each kind of them at once."""

    def __init__(self, device: Device, lanes: Lanes) -> None:
        self._device = device
        self._in = _Buffer(device, lanes, WHAT)
        self._out = _Buffer(device, lanes, WHAT)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="adapters")
        self._table: tuple[str | None, Tensor] | None = None
        self._ahead: _Ahead | None = None
        self._rows = [_Buffer(device, lanes, ROWS) for _ in range(2)]

    def to_device(self, stored: Mapping[str, Tensor]) -> tuple[SlotForm, Tensor]:
        """Give copies of host tensors as one run of bytes on the device, and its form."""
        form = SlotForm.of(stored, None)
        host = self._in.of(form.bytes)
        for name, place in form.tensors(host).items():
            copy_small(stored[name], place)
        found = host.to(self._device.torch_device, non_blocking=True, copy=True)
        self._in.copied()
        return form, found

    def to_host(self, form: SlotForm, image: Tensor) -> dict[str, Tensor]:
        """Give the tensors of a run of bytes in host memory, good until this is called again."""
        host = self._out.of(form.bytes)
        host.copy_(image, non_blocking=True)
        self._device.wait()
        return form.tensors(host)

    def run_to_device(self, bodies: Bodies, shards: Mapping[str, TensorImage]) -> Tensor:
        """Give copies of shards' bodies as one run of bytes on the device."""
        host = self._in.of(bodies.bytes)
        target: NDArray[np.uint8] = host.numpy()

        def copy(shard: str) -> None:
            body, start = body_of(shards[shard]), bodies.starts[shard]
            np.copyto(target[start : start + body.nbytes], body)

        for _ in self._each(copy, bodies):
            pass
        found = host.to(self._device.torch_device, non_blocking=True, copy=True)
        self._in.copied()
        return found

    def run_to_host(self, image: Tensor) -> None:
        """Begin to copy a run of bytes to host memory."""
        self._out.of(image.nbytes).copy_(image, non_blocking=True)

    def fill(self, bodies: Bodies, shards: Mapping[str, TensorImage]) -> Iterator[str]:
        """Copy what `run_to_host` brought into shards; give each that is complete, in order.

        The device has been waited for. A few threads share the copies, each takes a whole shard.
        """
        source: NDArray[np.uint8] = self._out.of(bodies.bytes).numpy()

        def copy(shard: str) -> None:
            body, start = body_of(shards[shard]), bodies.starts[shard]
            np.copyto(body, source[start : start + body.nbytes])

        return self._each(copy, bodies)

    def _each(self, copy: Callable[[str], None], bodies: Bodies) -> Iterator[str]:
        """Copy all shards; give each, in order, when its share is done. The first is this thread's.

        A thread that is woken for little takes longer than the copy.
        """
        names = [*bodies.starts]
        count = min(THREADS, 1 + bodies.bytes // SHARE_BYTES)
        ends = [len(names) * part // count for part in range(count + 1)]
        shares = [names[start:end] for start, end in pairwise(ends)]

        def copy_all(share: list[str]) -> None:
            for name in share:
                copy(name)

        others = [self._pool.submit(copy_all, share) for share in shares[1:]]
        copy_all(shares[0])
        yield from shares[0]
        for share, other in zip(shares[1:], others, strict=True):
            other.result()
            yield from share

    def rows_of(self, digest: str | None, table_VD: Tensor, ids: Tensor) -> Tensor:
        """Look ids up in a table in host memory; give the rows on the device."""
        on_host = ids.to("cpu").flatten()
        ahead, self._ahead, self._table = self._ahead, None, (digest, table_VD)
        if ahead is not None and ahead.digest == digest and torch.equal(ahead.ids, on_host):
            return ahead.rows.view(*ids.shape, -1)
        return self._looked_up(table_VD, on_host).view(*ids.shape, -1)

    def look_up_ahead(self, ids: Tensor) -> None:
        """Look up what will be asked for first, in the table of this pass, which is let go."""
        (digest, table_VD), self._table = self._table or (None, None), None
        if digest is not None and table_VD is not None:
            on_host = ids.flatten()
            rows = self._looked_up(table_VD, on_host)
            self._ahead = _Ahead(digest=digest, ids=on_host, rows=rows)

    def _looked_up(self, table_VD: Tensor, on_host: Tensor) -> Tensor:
        buffer = self._rows[0]
        self._rows.reverse()
        size = on_host.numel() * table_VD.shape[1] * table_VD.dtype.itemsize
        rows = buffer.of(size).view(table_VD.dtype).view(on_host.numel(), table_VD.shape[1])
        torch.index_select(table_VD, 0, on_host, out=rows)
        found = rows.to(self._device.torch_device, non_blocking=True, copy=True)
        buffer.copied()
        return found
