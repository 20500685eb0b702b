"""Products with a frozen weight, and what an adapter adds to them.

Owns where a product is replaced; the arithmetic is that of `trainer.model.adapters`. Knows nothing
of stages. Any code that calls `F.linear`
with a weight that is known here gets the sum, so that a model's own layers run as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trainer.model.adapters import Adapter

# Gives x W^T + b for a weight in another form than a matrix.
Product = Callable[[Tensor, Tensor | None], Tensor]


class _BackAlone(torch.autograd.Function):
    """A product whose value nobody asks for: it goes back as `F.linear` does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x.new_zeros(()).expand(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        [weight] = ctx.saved_tensors
        [gradient] = gradients
        return (gradient.flatten(0, -2) @ weight).view(*gradient.shape[:-1], -1), None


def back_alone(weight: Tensor) -> Product:
    """Give the product with a frozen weight for a replay that has no use for its value."""

    def multiply(x: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is None
        output: Tensor = _BackAlone.apply(x, weight)  # type: ignore[no-untyped-call]
        return output

    return multiply


def rms_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Give `F.rms_norm` as models write it down: a device's own kernel goes back otherwise."""
    assert len(normalized_shape) == 1
    assert eps is not None
    normed = input * torch.rsqrt(input.pow(2).mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * weight


class AdaptedLinears(TorchFunctionMode):
    """While it is active, `F.linear` with a weight of `adapters` or `products` is replaced.

    Weights are told by identity. `F.rms_norm` is replaced by its formula.
    """

    def __init__(
        self,
        adapters: Sequence[tuple[Tensor, Adapter]],
        products: Sequence[tuple[Tensor, Product]] = (),
    ) -> None:
        super().__init__()
        self._adapters = {id(weight): adapter for weight, adapter in adapters}
        self._products = {id(weight): product for weight, product in products}
        self._held = [weight for weight, _ in (*adapters, *products)]
        self.used: set[int] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        if func is F.rms_norm:
            return rms_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
        product = self._products.get(id(weight))
        # The mode is off in here: this is the plain product.
        output = F.linear(input, weight, bias) if product is None else product(input, bias)
        adapter = self._adapters.get(id(weight))
        if adapter is None:
            return output
        self.used.add(id(weight))
        return adapter.added_to(output, input)

    @property
    def unused(self) -> int:
        """Count the adapters that no product asked for."""
        return len(self._adapters.keys() - self.used)
