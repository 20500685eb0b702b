"""Adapted blocks as compiled functions: fewer, larger kernels, and in a replay no idle product.

Owns the compiled functions, one set a model geometry and set of adapters, and what a block leaves
for its replay. Knows nothing of where weights come from or of where what is left waits. Compiled
kernels round otherwise than PyTorch's own, so whether blocks are compiled belongs to a run's
recipe. Invariant: each piece of a block is one function, called forward in both passes and back in
the second, so that a replay sees the bits of the first pass, whether they were kept or not.

The last product is added to the output and goes nowhere else: who computes the block again for its
gradients has no use for it. What was kept is not computed again either: attention, and the sum of
its projection and the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainer.gradients import GradientSum
from trainer.lora.attention import Attention, attention_for
from trainer.lora.pieces import GATES, GROUPS, INPUTS, LAST, OUTPUT, Group, Pieces
from trainer.lora.recorded import Recorder
from trainer.lora.stages import AdaptedStage
from trainer.model.adapter_settings import LoraSettings
from trainer.model.compiled import Blocks, compiled_closed, leaf, told
from trainer.model.stages import Block, Stage

Named = Mapping[str, Tensor]
Called = Callable[..., Any]


class CompiledAdapted(Blocks):
    """Runs native blocks with adapters; a block whose weights are bound packed is left out."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        self._functions: dict[tuple[object, ...], Functions] = {}
        self.recorder = recorder

    def takes(self, stage: Stage) -> bool:
        """Say whether a stage runs compiled."""
        return isinstance(stage, AdaptedStage) and isinstance(stage.inner, Block)

    def functions(
        self, block: Block, lora: LoraSettings, weights: Sequence[str], leaves: Sequence[str]
    ) -> Functions:
        """Give the pieces of blocks like this one."""
        return Functions(Pieces(block, lora), weights, leaves)

    def run(self, stage: Stage, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Compute a block's output, with its history where gradients are wanted.

        In a replay the output has its shape and its history alone.

        Raises:
            InputError: this machine cannot compile (no C compiler, no Triton).
        """
        assert isinstance(stage, AdaptedStage)
        call, binding = self.call(stage, params, x), stage.binding
        visit = call.visit(binding.left, is_replay=binding.is_replay)
        if not torch.is_grad_enabled():
            if self.recorder is not None and self.recorder.takes(x) and not binding.is_replay:
                return self.recorder.forward(call, x, binding.left)
            return visit.forward(call.weights, params, x)
        names = _Names(leaves=[*params], weights=[*call.weights])
        given = (visit, names, leaf(x), *map(leaf, params.values()), *call.weights.values())
        output: Tensor = _WithHistory.apply(*given)  # type: ignore[no-untyped-call]
        return output

    @torch.no_grad()
    def back(
        self,
        stage: Stage,
        params: Mapping[str, Tensor],
        x: Tensor,
        gradient: Tensor,
        total: GradientSum,
    ) -> Tensor | None:
        """See `Blocks`: what is recorded needs no autograd."""
        assert isinstance(stage, AdaptedStage)
        if self.recorder is None or not self.recorder.takes(x):
            return None
        detached = {name: each.detach() for name, each in params.items()}
        call = self.call(stage, detached, x)
        return self.recorder.back(call, x.detach(), gradient, stage.binding.left, total)

    def call(self, stage: AdaptedStage, params: Named, x: Tensor) -> Call:
        """Give a block as it is bound now."""
        block, binding = stage.inner, stage.binding
        assert isinstance(block, Block)
        weights = binding.weights()
        key = (block.config, tuple(params), stage.lora)
        if key not in self._functions:
            self._functions[key] = self.functions(block, stage.lora, [*weights], [*params])
        return Call(
            functions=self._functions[key],
            angles=block.angles(x),
            weights=weights,
            leaves=params,
            number=(binding, binding.visits),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A block as it is bound for one visit; `number` says which: adapters change between visits."""

    functions: Functions
    angles: tuple[Tensor, Tensor]
    weights: Named
    leaves: Named
    number: tuple[object, int]

    def with_leaves(self, leaves: Named) -> Call:
        """Give the same with other adapters."""
        return replace(self, leaves=leaves)

    def visit(self, left: list[Tensor] | None, *, is_replay: bool) -> _Visit:
        """Give one micro-batch's visit."""
        return _Visit(self.functions, self.angles, left, is_replay=is_replay)

    def forward(self, x: Tensor, left: list[Tensor] | None) -> Tensor:
        """Give the output; what is kept for the replay is added to `left`."""
        return self.visit(left, is_replay=False).forward(self.weights, self.leaves, x)

    def back(
        self, x: Tensor, gradient: Tensor, left: list[Tensor] | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the block again, but for `left`; give the gradients of x and leaves."""
        visit, history = self.visit(left, is_replay=True), list[Tensor]()
        visit.forward(self.weights, self.leaves, x, history)
        gradient = gradient.contiguous()
        found, by_leaf = visit.back(self.weights, self.leaves, x, history, gradient)
        return found, dict(zip(self.leaves, by_leaf, strict=True))


class Functions:
    """The pieces of blocks of one geometry, compiled, and the names of what they take.

    attention: what computes it; what the first heads ask for, where nothing is said.
    """

    def __init__(
        self,
        pieces: Pieces,
        weights: Sequence[str],
        leaves: Sequence[str],
        *,
        compiler: Callable[[Called], Called] | None = None,
        attention: Attention | None = None,
    ) -> None:
        self.weights, self.leaves = weights, leaves
        self._compiler = compiler or compiled_closed
        self._attention = attention
        self.heads = self._piece(INPUTS, pieces.heads)
        self.heads_back = self._piece(INPUTS, pieces.heads_back)
        self.summed = self._piece(OUTPUT, pieces.summed)
        self.summed_back = self._piece(OUTPUT, pieces.summed_back)
        self.gated = self._piece(GATES, pieces.gated)
        self.gated_back = self._piece(GATES, pieces.gated_back)
        self.last = self._piece(LAST, pieces.last)
        self.last_back = self._piece(LAST, pieces.last_back)

    def attention(self, heads: Sequence[Tensor]) -> Attention:
        """Give what computes attention."""
        if self._attention is None:
            self._attention = attention_for(*heads)
        return self._attention

    def by_leaf(self, *found: Sequence[Tensor]) -> list[Tensor]:
        """Give the gradients of adapters, which come by group, in the order of all leaves."""
        named: dict[str, Tensor] = {}
        for group, tensors in zip(GROUPS, found, strict=True):
            named |= zip(group.leaves(self.leaves), tensors, strict=True)
        return [named[name] for name in self.leaves]

    def _piece(self, group: Group, function: Callable[..., Any]) -> _Piece:
        weights, leaves = group.weights(self.weights), group.leaves(self.leaves)

        def called(bound: list[Tensor], adapters: list[Tensor], *inputs: Any) -> Any:
            named = dict(zip(weights, bound, strict=True))
            return function(named, dict(zip(leaves, adapters, strict=True)), *inputs)

        return _Piece(weights=weights, leaves=leaves, function=self._compiler(called))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """One compiled function; it is handed those of a block's tensors that it is about."""

    weights: Sequence[str]
    leaves: Sequence[str]
    function: Callable[..., Any]

    def __call__(self, weights: Named, leaves: Named, *inputs: Any) -> Any:
        bound = [weights[name] for name in self.weights]
        return told(self.function, bound, [leaves[name] for name in self.leaves], *inputs)


class _Visit:
    """One micro-batch in a block.

    left: what the first pass leaves for the replay; None where nothing is kept.
    """

    def __init__(
        self,
        functions: Functions,
        angles: tuple[Tensor, Tensor],
        left: list[Tensor] | None,
        *,
        is_replay: bool,
    ) -> None:
        self._functions = functions
        self._angles = angles
        self._is_replay = is_replay
        self._left = left
        self._counts: Sequence[int] = ()

    def forward(
        self, weights: Named, leaves: Named, x: Tensor, history: list[Tensor] | None = None
    ) -> Tensor:
        """Give the output; what `back` takes is added to `history` where there is one."""
        functions = self._functions
        turned, beside = functions.heads(weights, leaves, x, *self._angles)
        if self._is_replay and self._left:
            middle = self._left
        else:
            middle = [*functions.attention(turned).forward(*turned)]
            middle.append(functions.summed(weights, leaves, x, middle[0]))
            if self._left is not None:
                self._left += middle
        if history is None:
            turned, beside = [], []
        summed = middle[2]
        gates, low = functions.gated(weights, leaves, summed)
        if history is not None:
            parts = (turned, beside, middle, gates, low)
            self._counts = [len(part) for part in parts]
            history += [each for part in parts for each in part]
        del turned, beside, middle, low
        if self._is_replay:
            return x.new_zeros(()).expand(x.shape)
        output: Tensor = functions.last(weights, leaves, summed, *gates)
        return output

    def back(
        self, weights: Named, leaves: Named, x: Tensor, history: list[Tensor], gradient: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Give the gradients of x and of adapters."""
        functions = self._functions
        turned, beside, middle, gates, low = self._parted(history)
        mixed, sums, summed = middle
        of_gates, of_last = functions.last_back(weights, leaves, *gates, gradient)
        del gates
        below = (summed, low, of_gates, gradient)
        of_summed, of_pair = functions.gated_back(weights, leaves, *below)
        del of_gates, low, summed, below, gradient
        of_mixed, of_output = functions.summed_back(weights, leaves, mixed, of_summed)
        query, key, value = turned
        attention = functions.attention(turned)
        of_turned = [*attention.back(of_mixed, (query, key, value), mixed, sums)]
        del of_mixed, turned, query, key, value, mixed, sums, middle
        inputs = (x, *self._angles, beside, of_turned, of_summed)
        of_x, of_inputs = functions.heads_back(weights, leaves, *inputs)
        return of_x, functions.by_leaf(of_inputs, of_output, of_pair, of_last)

    def _parted(self, history: list[Tensor]) -> Iterator[list[Tensor]]:
        for count in self._counts:
            yield history[:count]
            del history[:count]


class _WithHistory(torch.autograd.Function):
    """A visit that autograd goes back through."""

    @staticmethod
    def forward(ctx: Any, visit: _Visit, names: _Names, x: Tensor, *others: Tensor) -> Tensor:
        ctx.visit, ctx.names = visit, names
        history: list[Tensor] = []
        weights, leaves = names.parted([each.detach() for each in others])
        output = visit.forward(weights, leaves, x.detach(), history)
        ctx.save_for_backward(x, *others, *history)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *saved = (each.detach() for each in ctx.saved_tensors)
        count = ctx.names.count
        weights, leaves = ctx.names.parted(saved[:count])
        del saved[:count]
        [gradient] = gradients
        of_x, found = ctx.visit.back(weights, leaves, x, saved, gradient.contiguous())
        nothing = [None] * len(weights)
        return None, None, of_x, *found, *nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class _Names:
    """The adapters and frozen tensors of a block, in the order in which autograd has them."""

    leaves: Sequence[str]
    weights: Sequence[str]

    @property
    def count(self) -> int:
        """Give how many tensors there are."""
        return len(self.leaves) + len(self.weights)

    def parted(self, tensors: Sequence[Tensor]) -> tuple[Named, Named]:
        """Give frozen tensors and adapters by name."""
        names = (*self.leaves, *self.weights)
        named = dict(zip(names, tensors, strict=True))
        return (
            {name: named[name] for name in self.weights},
            {name: named[name] for name in self.leaves},
        )
