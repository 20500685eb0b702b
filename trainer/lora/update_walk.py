"""What updating adapters takes of a device, on tensors without content.

Owns the walk through `trainer.lora.updating`, either way: all adapters as one tensor, or each by
itself between two runs of bytes. Knows nothing of the passes before. Host memory is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from shardb import ShardView, TensorSpec, torch_adaptor
from shardb.layout import build
from trainer.device import Device
from trainer.lora.forms import whole
from trainer.lora.runs import Runs
from trainer.lora.stages import AdaptedStage
from trainer.lora.targets import adapter_specs
from trainer.lora.updating import ELEMENTWISE, update_as_one
from trainer.optimizers.rule import UpdateRule
from trainer.optimizers.tiles import ShardUpdate
from trainer.vram_trace import META, MemoryTrace

Named = Mapping[str, Tensor]
# Beside a factor for each shard: the norm of all, what is made of it, and the rule's own.
SCALARS = 8


def walk_update(
    trace: MemoryTrace,
    trunk: Sequence[AdaptedStage],
    gradients: Mapping[str, Named],
    rule: UpdateRule,
) -> None:
    """Go through an update; gradients: by stage."""
    owners = [stage for stage in trunk if stage.parameters]
    scalars = [torch.empty((), device=META) for _ in range(len(owners) + SCALARS)]
    specs = {stage.name: adapter_specs(stage.inner, stage.lora) for stage in owners}
    states = {name: dict(rule.state_specs(each)) for name, each in specs.items()}
    runs = Runs.of(_views(specs), _views(states)) if isinstance(rule, ELEMENTWISE) else None
    if runs is not None:
        _as_one(runs, gradients, rule)
    else:
        _each(trace, specs, states, gradients, rule)
    del scalars


def _as_one(runs: Runs, gradients: Mapping[str, Named], rule: UpdateRule) -> None:
    image = torch.empty(runs.bytes, dtype=torch.uint8, device=META)
    params, states = runs.flat_adapters(image), runs.flat_states(image)
    gradient = runs.flat(gradients)
    update_as_one(rule, Device(META), params, states, gradient, learning_rate=1e-3, step=1)


def _each(
    trace: MemoryTrace,
    specs: Mapping[str, Mapping[str, TensorSpec]],
    states: Mapping[str, Mapping[str, TensorSpec]],
    gradients: Mapping[str, Named],
    rule: UpdateRule,
) -> None:
    kinds = (*specs.values(), *states.values())
    size = sum(whole(spec.bytes) for named in kinds for spec in named.values())
    images = [torch.empty(size, dtype=torch.uint8, device=META) for _ in range(2)]
    with trace.left_out():  # they lie in both
        old, new = (_values(specs), _values(states)), (_values(specs), _values(states))
    update = ShardUpdate(
        params=old[0],
        state=old[1],
        new_params=new[0],
        new_state=new[1],
        gradients={
            f"{stage}:{n}": g for stage, named in gradients.items() for n, g in named.items()
        },
        gradient_scale=0.5,
        learning_rate=1e-3,
        step=1,
    )
    rule.update(Device(META), update)
    del images


def _values(specs: Mapping[str, Mapping[str, TensorSpec]]) -> dict[str, Tensor]:
    return {
        f"{stage}:{name}": torch.empty(
            spec.shape, dtype=torch_adaptor.DTYPES[spec.dtype], device=META
        )
        for stage, named in specs.items()
        for name, spec in named.items()
    }


def _views(specs: Mapping[str, Mapping[str, TensorSpec]]) -> dict[str, ShardView]:
    """Give views of shards without content."""
    found = {}
    for stage, named in specs.items():
        layout = build(named)
        image = np.broadcast_to(np.uint8(0), layout.size_bytes)
        found[stage] = ShardView(stage, layout, image, None)
    return found
