"""Blocks as one compiled function each way: fewer, larger kernels and the same sums every time.

Owns the compiled functions, one a model geometry, since every block has the same shapes. Knows
nothing of where parameters come from. Compiled kernels round otherwise than PyTorch's own, so
whether blocks are compiled belongs to a run's recipe. Invariant: a block's forward pass is always
the one that autograd would keep, also where nothing is kept: another one might fuse, and round,
differently, and then a replay would not see what the forward pass had seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.errors import InputError
from trainer.model.config import ModelConfig
from trainer.model.stages import Block

Compiled = Callable[[list[Tensor], Tensor, Tensor, Tensor], Tensor]
REMEDY = "give --no-compile-blocks to use PyTorch's own kernels"


class CompiledBlocks:
    """Runs blocks through functions that are compiled at their first use."""

    def __init__(self) -> None:
        self._functions: dict[ModelConfig, Compiled] = {}

    def run(self, block: Block, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Compute a block's output, with its history where gradients are wanted.

        Raises:
            InputError: this machine cannot compile (no C compiler, no Triton).
        """
        function = self._functions.get(block.config)
        if function is None:
            function = self._functions[block.config] = _compiled(block.config)
        leaves = [_leaf(params[name]) for name in block.parameters]
        cos_TK, sin_TK = block.angles(x)
        try:
            with torch.enable_grad():
                output = function(leaves, _leaf(x), cos_TK, sin_TK)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise InputError(
                f"blocks cannot be compiled here: {_first(error)}; {REMEDY}"
            ) from error
        return output if torch.is_grad_enabled() else output.detach()


def _compiled(config: ModelConfig) -> Compiled:
    block = Block(config, 0)
    names = list(block.parameters)

    def forward(leaves: list[Tensor], x: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        params = dict(zip(names, leaves, strict=True))
        return block.forward_turned(params, x, (cos_TK, sin_TK))

    function: Compiled = torch.compile(forward, fullgraph=True, dynamic=False, options=_options())
    return function


def _options() -> dict[str, Any]:
    """Nothing is chosen by timing it: two processes must make the same kernels."""
    known = torch._inductor.list_options()
    return {"deterministic": True} if "deterministic" in known else {}


def _leaf(tensor: Tensor) -> Tensor:
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()


def _first(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
