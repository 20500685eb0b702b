"""What a step with adapters asks of a machine beside its products, counted in a walk through it.

Owns the counts: operations that the host asks for, and values that pass through operations which
are no products. Knows nothing of rates. The walk is that of memory,
on tensors without content, so what is computed is what is counted; compiled blocks are counted as
PyTorch's own kernels would compute them, which is more than they ask for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_iter

from trainer.lora.walk import walk_through
from trainer.model.adapter_settings import LoraSettings
from trainer.vram import StepShape, carried_on
from trainer.vram_trace import MemoryTrace

PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm"))
UNTOUCHED = frozenset(("empty", "empty_like", "new_empty", "empty_strided", "detach"))
# Attention's scores: their powers and sums twice forward and twice again, three times back.
PASSES_OF_SCORES = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """Of a whole step: operations asked for, and values passed through them."""

    calls: int
    values: int


class CountingTrace(MemoryTrace):  # type: ignore[no-untyped-call]
    """Counts operations and values, those of the head's phase by themselves too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}
        self.values = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = {_storage(each) for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.calls[self._phase] = self.calls.get(self._phase, 0) + 1
        name = func._schema.name.partition("::")[2]
        if name not in PRODUCTS | UNTOUCHED:
            made = [each for each in tree_iter(result) if isinstance(each, Tensor)]
            is_new = name.endswith("_") or any(_storage(each) not in given for each in made)
            self.values += sum(each.numel() for each in made) if is_new else 0
        return result


def _storage(tensor: Tensor) -> int:
    found: int = tensor.untyped_storage()._cdata
    return found


def step_work(shape: StepShape, lora: LoraSettings, *, is_host: bool) -> StepWork:
    """Count the work of a step; a device's fused kernels of attention keep scores to themselves."""
    model, tokens = shape.model, shape.micro_batch_size * shape.seq_len
    options = replace(
        shape.options,
        compile_blocks=False,
        activation_placement="vram",
        lm_head_chunk_tokens=tokens,
    )
    if options.activations == "attention":
        options = replace(options, activations="recompute")
    whole = replace(shape, options=options)
    counted = carried_on(whole, model.num_layers, shape.accumulation, partial(_counted, lora=lora))
    chunks = math.ceil(tokens / shape.options.lm_head_chunk_tokens)
    scores = model.num_layers * model.num_heads * tokens * shape.seq_len * shape.accumulation
    passed = PASSES_OF_SCORES if is_host or options.dtype == "fp32" else 0
    return StepWork(
        calls=counted["calls"] + (chunks - 1) * counted["head"],
        values=counted["values"] + passed * scores,
    )


@lru_cache(maxsize=64)
def _counted(shape: StepShape, blocks: int, *, lora: LoraSettings) -> Mapping[str, int]:
    trace = CountingTrace()
    walk_through(shape, blocks, lora, trace, is_host=True)
    return trace.calls | {"calls": sum(trace.calls.values()), "values": trace.values}


def block_calls(shape: StepShape, lora: LoraSettings) -> int:
    """Count the operations of one block, both ways, for one micro-batch."""
    counted = carried_on(shape, 1, 1, partial(_counted, lora=lora))
    return counted["forward block"] + counted["backward block"]
