"""Blocks as one compiled function each way: fewer, larger kernels and the same sums every time.

Owns the compiled functions, one a model geometry, since every block has the same shapes. Knows
nothing of where parameters come from. Compiled kernels round otherwise than PyTorch's own, so
whether blocks are compiled belongs to a run's recipe. Invariant: a block's forward pass is always
the one that autograd would keep, also where nothing is kept: another one might fuse, and round,
differently, and then a replay would not see what the forward pass had seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from trainer.errors import InputError
from trainer.gradients import GradientSum
from trainer.model.config import ModelConfig
from trainer.model.stages import Block, Stage

Compiled = Callable[[list[Tensor], Tensor, Tensor, Tensor], Tensor]
F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")
# Forms of tensors, and what is asked of all computing.
LOOKED_AT = ("TENSOR_MATCH", "GRAD_MODE", "DETERMINISTIC_ALGORITHMS")
# It came with the choice of what is looked at.
FILTERED_SINCE = "skip_guard_on_inbuilt_nn_modules_unsafe"
REMEDY = "give --no-compile-blocks to use PyTorch's own kernels"


class Blocks(Protocol):
    """Runs some kinds of stages in another way than by their own `forward`."""

    def takes(self, stage: Stage) -> bool:
        """Say whether a stage is one of them."""
        ...

    def run(self, stage: Stage, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Compute a stage's output, with its history where gradients are wanted."""
        ...

    def back(
        self,
        stage: Stage,
        params: Mapping[str, Tensor],
        x: Tensor,
        gradient: Tensor,
        total: GradientSum,
    ) -> Tensor | None:
        """Compute a stage again and go back through it; give the gradient of x.

        None where only autograd knows the way back: then nothing was done.
        """
        return None


class CompiledBlocks(Blocks):
    """Runs blocks through functions that are compiled at their first use."""

    def __init__(self) -> None:
        self._functions: dict[ModelConfig, Compiled] = {}

    def takes(self, stage: Stage) -> bool:
        """Say whether a stage runs compiled."""
        return isinstance(stage, Block)

    def run(self, stage: Stage, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Compute a block's output, with its history where gradients are wanted.

        Raises:
            InputError: this machine cannot compile (no C compiler, no Triton).
        """
        assert isinstance(stage, Block)
        function = self._functions.get(stage.config)
        if function is None:
            function = self._functions[stage.config] = _compiled(stage.config)
        leaves = [leaf(params[name]) for name in stage.parameters]
        return with_history(function, leaves, leaf(x), *stage.angles(x))


def _compiled(config: ModelConfig) -> Compiled:
    block = Block(config, 0)
    names = list(block.parameters)

    def forward(leaves: list[Tensor], x: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        params = dict(zip(names, leaves, strict=True))
        return block.forward_turned(params, x, (cos_TK, sin_TK))

    return compiled(forward)


def compiled(forward: F) -> F:
    """Compile a function of tensors, for the shapes that it is called with."""
    return cast(F, torch.compile(forward, fullgraph=True, dynamic=False, options=_options()))


def compiled_closed(forward: F) -> F:
    """Compile a function that tensors alone, and what never changes, decide.

    Each call looks at the tensors' forms and at nothing else. Compiled functions are found by their
    code: each of these has its own, so that none is looked for among those of the others.
    """
    assert isinstance(forward, FunctionType)
    code = forward.__code__.replace()
    own = FunctionType(
        code, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
    )
    options = _options()
    if hasattr(torch.compiler, FILTERED_SINCE):
        options["guard_filter_fn"] = _about_tensors
    return cast(F, torch.compile(own, fullgraph=True, dynamic=False, options=options))


def _about_tensors(guards: Sequence[Any]) -> list[bool]:
    return [guard.guard_type in LOOKED_AT for guard in guards]


def with_history(function: Callable[..., R], *inputs: object) -> R:
    """Call a compiled function as autograd would keep it, also where nothing is kept.

    Raises:
        InputError: this machine cannot compile (no C compiler, no Triton).
    """
    with torch.enable_grad():
        found = told(function, *inputs)
    if torch.is_grad_enabled():
        return found
    return cast(R, tree_map_only(Tensor, Tensor.detach, found))


def told(function: Callable[..., R], *inputs: object) -> R:
    """Call a compiled function; what its compiler cannot do is said in words.

    Raises:
        InputError: this machine cannot compile (no C compiler, no Triton).
    """
    try:
        return function(*inputs)
    except torch._dynamo.exc.TorchDynamoException as error:
        raise InputError(f"blocks cannot be compiled here: {_first(error)}; {REMEDY}") from error


def leaf(tensor: Tensor) -> Tensor:
    """Give a tensor that gradients reach: itself, or the root of a history of its own."""
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()


def _options() -> dict[str, Any]:
    """Nothing is chosen by timing it: two processes must make the same kernels."""
    known = torch._inductor.list_options()
    return {"deterministic": True} if "deterministic" in known else {}


def _first(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
