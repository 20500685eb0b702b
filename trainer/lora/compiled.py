"""Adapted blocks as one compiled function each way: fewer, larger kernels.

Owns the compiled functions, one a model geometry and set of adapters. Knows nothing of where
weights come from. Compiled kernels round otherwise than PyTorch's own, so whether blocks are
compiled belongs to a run's recipe; the invariant is that of `trainer.model.compiled`: a forward
pass is always the one that autograd would keep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from trainer.lora.stages import AdaptedStage
from trainer.model.adapters import A_ENDS, B_ENDS, Adapter
from trainer.model.compiled import Blocks, compiled, leaf, with_history
from trainer.model.layers import AdaptedWeight
from trainer.model.stages import Block, Stage

Function = Callable[[list[Tensor], list[Tensor], Tensor, Tensor, Tensor], Tensor]


class CompiledAdapted(Blocks):
    """Runs native blocks with adapters; a block whose weights are bound packed is left out."""

    def __init__(self) -> None:
        self._functions: dict[tuple[object, ...], Function] = {}

    def takes(self, stage: Stage) -> bool:
        """Say whether a stage runs compiled."""
        return isinstance(stage, AdaptedStage) and isinstance(stage.inner, Block)

    def run(self, stage: Stage, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Compute a block's output, with its history where gradients are wanted.

        Raises:
            InputError: this machine cannot compile (no C compiler, no Triton).
        """
        assert isinstance(stage, AdaptedStage)
        block = stage.inner
        assert isinstance(block, Block)
        weights = stage.binding.weights()
        key = (block.config, tuple(params), stage.lora)
        if key not in self._functions:
            self._functions[key] = _compiled(stage, block, list(weights), list(params))
        leaves = [leaf(tensor) for tensor in params.values()]
        matrices = list(weights.values())
        return with_history(self._functions[key], matrices, leaves, leaf(x), *block.angles(x))


def _compiled(
    stage: AdaptedStage, block: Block, weight_names: list[str], names: list[str]
) -> Function:
    modules = [name.removesuffix(A_ENDS) for name in names if name.endswith(A_ENDS)]
    scale, rounds_first = stage.lora.scale, stage.is_packed

    def forward(
        weights: list[Tensor], leaves: list[Tensor], x: Tensor, cos_TK: Tensor, sin_TK: Tensor
    ) -> Tensor:
        bound: dict[str, Any] = dict(zip(weight_names, weights, strict=True))
        params = dict(zip(names, leaves, strict=True))
        for module in modules:
            adapter = Adapter(
                a_RI=params[module + A_ENDS],
                b_OR=params[module + B_ENDS],
                scale=scale,
                rounds_first=rounds_first,
            )
            matrix = bound[f"{module}.weight"]
            bound[f"{module}.weight"] = AdaptedWeight(matrix, adapter.added_to)
        return block.forward_turned(bound, x, (cos_TK, sin_TK))

    return compiled(forward)
