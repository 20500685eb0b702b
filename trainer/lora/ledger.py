"""What a stage's first pass computed, kept for when it is computed again for its gradients.

Owns the ledger of one stage and micro-batch: outputs of products with frozen weights and of
attention, in the order of calls. The replay makes the same calls in the same order and takes them
instead of computing; what lies between is computed again. A product's way back needs its weight,
which is bound then; attention's needs what it was given, which the replay computes, and its sums,
which are kept. Knows nothing of stages. Invariants: no weight is held; each piece leaves the ledger
when it is taken; the bits are those of a replay that computes everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

# Of `F.scaled_dot_product_attention`, in their order.
ATTENTION_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
# Makes what comes back of a product's output, and of its weight, into what comes back of its input.
Back = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """x W^T + b with a frozen weight in some form.

    saved: what `back` needs of the weight, bound as long as the stage is.
    """

    multiply: Callable[[Tensor, Tensor | None], Tensor]
    back: Back
    saved: Tensor
    width: int


def matrix_back(gradient: Tensor, weight: Tensor) -> Tensor:
    """Go back through a product with a matrix as `F.linear` does."""
    return (gradient.flatten(0, -2) @ weight).view(*gradient.shape[:-1], -1)


class _BackAlone(torch.autograd.Function):
    """A product that is not computed: it has its value already, and goes back as it would."""

    @staticmethod
    def forward(ctx: Any, _x: Tensor, product: Product, value: Callable[[], Tensor]) -> Tensor:
        ctx.back = product.back
        ctx.save_for_backward(product.saved)
        return value()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        [saved] = ctx.saved_tensors
        [gradient] = gradients
        return ctx.back(gradient, saved), None, None


def valueless(product: Product) -> Product:
    """Give the product for a replay that has no use for its value."""

    def multiply(x: Tensor, _bias: Tensor | None) -> Tensor:
        def shaped() -> Tensor:
            return x.new_zeros(()).expand(*x.shape[:-1], product.width)

        output: Tensor = _BackAlone.apply(x, product, shaped)  # type: ignore[no-untyped-call]
        return output

    return Product(multiply=multiply, back=product.back, saved=product.saved, width=product.width)


class Calls(Protocol):
    """Who computes the products and attention of a stage, or has them already."""

    def product(self, product: Product, x: Tensor, bias: Tensor | None) -> Tensor:
        """Give a product with a frozen weight."""
        ...

    def attention(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor:
        """Give what attention makes of queries, keys and values."""
        ...


class Computing:
    """Computes everything and keeps nothing."""

    def product(self, product: Product, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `Calls`."""
        return product.multiply(x, bias)

    def attention(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor:
        """See `Calls`."""
        output: Tensor = function(*args, **kwargs)
        return output


@dataclass(frozen=True, kw_only=True, slots=True)
class _Output:
    """A product's output, and its version: who wrote into it has spoilt it."""

    value: Tensor
    version: int


@dataclass(frozen=True, slots=True)
class _Place:
    """A view of something that attention was given: which, and how it lies in it, in elements."""

    index: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class _Given:
    """Stands between a call's history and what the call was given, which is not kept.

    It does not know the call: the history holds it, and neither would ever go.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        self.brought: Sequence[Tensor] = ()
        self.held: dict[int, int] = {}
        self._places = {
            _storage(each): (index, int(each.storage_offset()))
            for index, each in reversed([*enumerate(given)])
        }

    def pack(self, saved: Tensor) -> Tensor | _Place:
        """Keep what is no view of what was given."""
        known = self._places.get(_storage(saved))
        if known is None:
            self.held[_storage(saved)] = saved.untyped_storage().nbytes()
            return saved.detach()
        index, start = known
        return _Place(index, saved.shape, saved.stride(), int(saved.storage_offset()) - start)

    def unpack(self, packed: Tensor | _Place) -> Tensor:
        """Give the same view of what is brought now."""
        if isinstance(packed, Tensor):
            return packed
        given = self.brought[packed.index]
        start = given.storage_offset() + packed.offset
        return given.as_strided(packed.shape, packed.strides, start)


class _Attention:
    """One call with its history, but without what it was given: a replay brings that again."""

    def __init__(
        self, function: Callable[..., Any], given: Sequence[Tensor], kwargs: Mapping[str, Any]
    ) -> None:
        self._given = _Given(given)
        self._leaves = [each.detach().requires_grad_() for each in given[:3]]
        hooks = torch.autograd.graph.saved_tensors_hooks(self._given.pack, self._given.unpack)
        with torch.enable_grad(), hooks:
            self._result: Tensor = function(*self._leaves, **kwargs)
        self._given.held.pop(_storage(self._result), None)
        self._version = self._result._version
        for leaf in self._leaves:
            # The graph holds its leaves: let them keep their shape and drop the memory.
            leaf.data = leaf.new_empty(()).expand(leaf.shape)

    @property
    def is_small(self) -> bool:
        """Say whether no more is kept beside the output than that takes.

        Where PyTorch computes attention by its formula, it keeps the scores.
        """
        return sum(self._given.held.values()) <= self._result.nbytes

    def value(self) -> Tensor:
        """Give the output without its history."""
        assert self._result._version == self._version, "what attention gave was written into"
        return self._result.detach()

    def back(self, given: Sequence[Tensor], gradient: Tensor) -> tuple[Tensor, ...]:
        """Go back, once, with what the call was given."""
        self._given.brought = given
        found = torch.autograd.grad(self._result, self._leaves, gradient)
        self._given.brought = ()
        return found


def _storage(tensor: Tensor) -> int:
    found: int = tensor.untyped_storage()._cdata
    return found


class _AttentionBack(torch.autograd.Function):
    """Attention that is not computed: it has its value already, and goes back as it would."""

    @staticmethod
    def forward(ctx: Any, attention: _Attention, *given: Tensor) -> Tensor:
        ctx.attention = attention
        ctx.save_for_backward(*given)
        return attention.value()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        given = [each.detach() for each in ctx.saved_tensors]
        found = ctx.attention.back(given, *gradients)
        return (None, *found, *[None] * (len(given) - len(found)))


class Ledger:
    """The pieces of one stage and micro-batch, in the order of calls."""

    def __init__(self) -> None:
        self._pieces: deque[_Output | _Attention | None] = deque()

    def __len__(self) -> int:
        return len(self._pieces)

    def put(self, piece: _Output | _Attention | None) -> None:
        """Add what a call gave; None where it is too much to keep."""
        self._pieces.append(piece)

    def take(self) -> _Output | _Attention | None:
        """Give the next piece, and hold it no longer."""
        assert self._pieces, "a replay makes the calls of the first pass and no other"
        return self._pieces.popleft()


class Keeping:
    """The first pass: computes, and puts what it computes into a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def product(self, product: Product, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `Calls`."""
        output = product.multiply(x, bias)
        self._ledger.put(_Output(value=output, version=output._version))
        return output

    def attention(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor:
        """See `Calls`."""
        given, others = _given(args, kwargs)
        kept = _Attention(function, given, others)
        self._ledger.put(kept if kept.is_small else None)
        return kept.value()


class Taking:
    """The replay: takes what the first pass put into a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def product(self, product: Product, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `Calls`."""
        kept = self._ledger.take()
        assert isinstance(kept, _Output), "a replay makes the calls of the first pass"
        value, version = kept.value, kept.version
        assert value._version == version, "what a product gave was written into"
        assert value.shape == (*x.shape[:-1], product.width)
        output: Tensor = _BackAlone.apply(x, product, lambda: value)  # type: ignore[no-untyped-call]
        return output

    def attention(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor:
        """See `Calls`."""
        kept = self._ledger.take()
        given, others = _given(args, kwargs)
        output: Tensor
        if kept is None:
            output = function(*given[:3], **others)
        else:
            assert isinstance(kept, _Attention), "a replay makes the calls of the first pass"
            output = _AttentionBack.apply(kept, *given)  # type: ignore[no-untyped-call]
        return output


def _given(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Tensor], dict[str, Any]]:
    """Give the tensors of a call, its mask last where there is one, and what is given by name.

    A mask of bools is made numbers, as attention does itself, so that it is known when it is kept.
    """
    named = dict(zip(ATTENTION_ARGUMENTS, args, strict=False)) | dict(kwargs)
    given = [named.pop(name) for name in ("query", "key", "value")]
    mask = named.get("attn_mask")
    if mask is None:
        return given, named
    if mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=given[0].dtype, device=mask.device)
        named["attn_mask"] = mask = zero.where(mask, -torch.inf)
    return [*given, mask], named
