"""Products with a frozen weight, and what an adapter adds to them.

Owns where a product is replaced; the arithmetic is that of `trainer.model.adapters`, and whether it
is made or taken belongs to `trainer.lora.ledger`. Knows nothing of stages. Any code that calls
`F.linear` with a weight that is known here gets the sum, so that a model's own layers run as they
are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trainer.lora.ledger import Calls, Computing, Product, matrix_back
from trainer.model.adapters import Adapter


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


def matrix_product(weight: Tensor) -> Product:
    """Give the product with a matrix."""
    return Product(
        multiply=partial(_multiplied, weight),
        back=matrix_back,
        saved=weight,
        width=weight.shape[0],
    )


def _multiplied(weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


class AdaptedLinears(TorchFunctionMode):
    """While it is active, `F.linear` with a weight of `adapters` or `products` is replaced.

    Weights are told by identity. `F.rms_norm` is replaced by its formula. calls: who computes
    products with frozen weights and attention. passed_by: of these weights the product is always
    computed.
    """

    def __init__(
        self,
        adapters: Sequence[tuple[Tensor, Adapter]],
        products: Sequence[tuple[Tensor, Product]] = (),
        calls: Calls | None = None,
        passed_by: Sequence[Tensor] = (),
    ) -> None:
        super().__init__()
        self._adapters = {id(weight): adapter for weight, adapter in adapters}
        self._products = {id(weight): product for weight, product in products}
        self._passed_by = {id(weight) for weight in passed_by}
        self._calls = calls or Computing()
        self._held = [*(weight for weight, _ in (*adapters, *products)), *passed_by]
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
        if func is F.scaled_dot_product_attention:
            return self._calls.attention(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
        # The mode is off in here: these are the plain products.
        product = self._products.get(id(weight)) or matrix_product(weight)
        if id(weight) in self._passed_by:
            output = product.multiply(input, bias)
        else:
            output = self._calls.product(product, input, bias)
        adapter = self._adapters.get(id(weight))
        if adapter is None:
            return output
        self.used.add(id(weight))
        return adapter.added_to(output, input)

    @property
    def unused(self) -> int:
        """Count the adapters that no product asked for."""
        return len(self._adapters.keys() - self.used)
