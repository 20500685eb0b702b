"""Frozen shards in host memory as a device takes them: one page-locked run of bytes a shard.

Owns the copies, made when a shard is first asked for and kept from step to step, and what stands in
for them where memory may not be page-locked: two buffers that are filled again and again. Knows
nothing of stages. Invariant: what is given has the bytes of the shard that was asked for, told by
its digest; a buffer is filled again only behind the copies out of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardb import torch_adaptor
from shardb.views import ShardView
from trainer.device import Device
from trainer.device_lanes import Lane, Lanes, Mark
from trainer.lora.forms import SlotForm

WHAT = "the frozen base"
STAGING = "the frozen base on its way"
STAGING_BUFFERS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class HostShard:
    """A shard as bytes in host memory, and where its tensors lie in them."""

    form: SlotForm
    image: Tensor
    digest: str | None


@dataclass(kw_only=True, slots=True)
class _Staging:
    buffer: Tensor
    copied: Mark | None = None


class HostBase:
    """Gives shards in one dtype; page-locked as far as that is allowed.

    is_kept: whether copies stay in host memory; otherwise each is made again when it is asked for.
    """

    def __init__(
        self, device: Device, lanes: Lanes, dtype: torch.dtype, *, is_kept: bool = True
    ) -> None:
        self._device = device
        self._lanes = lanes
        self._dtype = dtype
        self._is_kept = is_kept
        self._kept: dict[str, HostShard] = {}
        self._forms: dict[tuple[str, str | None], SlotForm] = {}
        self._staging: list[_Staging] = []
        self._last: _Staging | None = None

    def form(self, view: ShardView) -> SlotForm:
        """Give where a shard's tensors will lie."""
        key = (view.name, view.digest)
        if key not in self._forms:
            self._forms[key] = SlotForm.of(torch_adaptor.tensors(view), self._dtype)
        return self._forms[key]

    def shard(self, view: ShardView) -> HostShard:
        """Give a shard; what was given before may be filled again from here on."""
        self._last = None
        known = self._kept.get(view.name)
        if known is not None and known.digest == view.digest is not None:
            return known
        form = self.form(view)
        buffer = self._buffer(view.name, form.bytes)
        form.fill(buffer, torch_adaptor.tensors(view))
        found = HostShard(form=form, image=buffer[: form.bytes], digest=view.digest)
        if self._last is None:
            self._kept[view.name] = found
        return found

    def copied(self) -> None:
        """Say that PARAMS_IN was asked to copy what was given last."""
        if self._last is not None:
            self._last.copied = self._lanes.mark(Lane.PARAMS_IN)

    def _buffer(self, name: str, size: int) -> Tensor:
        known = self._kept.get(name)
        if known is not None and known.image.nbytes == size:
            self._device.wait()  # copies of what it holds now may be on their way
            return known.image
        if self._is_kept:
            buffer = self._device.host_buffer(size, WHAT)
            if self._device.is_host or buffer.is_pinned():
                return buffer
            self._is_kept = False
        return self._staging_buffer(size)

    def _staging_buffer(self, size: int) -> Tensor:
        """Give the buffer that was filled before the last one, when its copy is done."""
        if len(self._staging) == STAGING_BUFFERS:
            self._last = self._staging.pop(0)
            self._lanes.arrive(self._last.copied)
        else:
            self._last = _Staging(buffer=self._device.host_buffer(size, STAGING))
        if self._last.buffer.nbytes < size:
            self._last = _Staging(buffer=self._device.host_buffer(size, STAGING))
        self._staging.append(self._last)
        return self._last.buffer
