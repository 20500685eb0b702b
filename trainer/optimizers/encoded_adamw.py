"""AdamW whose state is stored in fewer bits: bf16, or int8 in blocks.

Owns the stored form of both moments. The update itself is `AdamW` in fp32, one tensor at a time:
decoded, updated, encoded. int8 codes the first moment, and the root of the second, because the root
is what divides and has half the second moment's range in bits. Knows nothing of stores.
Inexact against fp32 state, and deterministic: streaming and residence give the same bits.
Memory: two fp32 copies of the largest tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardb import TensorSpec
from trainer.device import Device
from trainer.optimizers import blocks
from trainer.optimizers.adamw import AdamW
from trainer.optimizers.tiles import ShardUpdate

State = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedAdamW:
    """`encoding` is `bf16` or `int8`."""

    inner: AdamW
    encoding: str

    def state_specs(self, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """Give the state that belongs to parameters of these specs; it starts at zero."""
        found: dict[str, TensorSpec] = {}
        for name, spec in specs.items():
            if self.encoding == "bf16":
                for moment in ("exp_avg", "exp_avg_sq"):
                    found[f"{name}.{moment}"] = TensorSpec(dtype="BF16", shape=spec.shape)
                continue
            scales = TensorSpec(dtype="F32", shape=(blocks.block_count(_elements(spec)),))
            found[f"{name}.exp_avg"] = TensorSpec(dtype="I8", shape=spec.shape)
            found[f"{name}.exp_avg.scale"] = scales
            found[f"{name}.exp_avg_sq"] = TensorSpec(dtype="U8", shape=spec.shape)
            found[f"{name}.exp_avg_sq.scale"] = scales
        return found

    def update(self, device: Device, shard: ShardUpdate) -> None:
        """Write the shard's next values; gradients are scaled in place and used up."""
        for name, gradient in shard.gradients.items():
            stored = {
                key: device.to_device(tensor)
                for key, tensor in shard.state.items()
                if key.startswith(f"{name}.exp_avg")
            }
            moments = self._decode(name, stored)
            one = replace(shard, gradients={name: gradient}, state=moments, new_state=moments)
            self.inner.update(device, one)
            for key, tensor in self._encode(name, moments).items():
                shard.new_state[key].copy_(tensor)

    def apply(
        self,
        params: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        *,
        decayed: Sequence[bool],
        step: Tensor,
        learning_rate: float,
    ) -> None:
        """Update tensors and their bf16 state in place, as `AdamW.apply` does; both moments."""
        assert self.encoding == "bf16", "codes in blocks go a whole tensor at a time"
        decoded = [[moment.float() for moment in moments] for moments in states]
        self.inner.apply(
            params, gradients, decoded, decayed=decayed, step=step, learning_rate=learning_rate
        )
        for moments, exact in zip(states, decoded, strict=True):
            torch._foreach_copy_(list(moments), exact)

    def _decode(self, name: str, stored: State) -> State:
        first, second = f"{name}.exp_avg", f"{name}.exp_avg_sq"
        if self.encoding == "bf16":
            return {key: stored[key].float() for key in (first, second)}
        root = blocks.decode(stored[second], stored[f"{second}.scale"])
        return {
            first: blocks.decode(stored[first], stored[f"{first}.scale"]),
            second: root.square_(),
        }

    def _encode(self, name: str, moments: State) -> State:
        first, second = f"{name}.exp_avg", f"{name}.exp_avg_sq"
        if self.encoding == "bf16":
            return {key: moments[key].to(torch.bfloat16) for key in (first, second)}
        code, scale = blocks.encode_signed(moments[first])
        root_code, root_scale = blocks.encode_unsigned(blocks.root(moments[second]))
        return {
            first: code,
            f"{first}.scale": scale,
            second: root_code,
            f"{second}.scale": root_scale,
        }


def _elements(spec: TensorSpec) -> int:
    count = 1
    for size in spec.shape:
        count *= size
    return count
