"""Are products of adapters in bf16 parts as near to what is right as those of fp32?

On a processor bf16 is multiplied in fp32, which is exact, so what is tested here is which parts are
multiplied. A device has its own sums, compiled.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.model import low_rank
from trainer.model.compiled import compiled

ROWS, IN, OUT, RANK = 768, 640, 512, 16
SCALE = 2.5
# Errors differ by luck, and on a device by how sums are cut.
NO_WORSE = 1.1


class Given:
    """Drawn tensors of one adapter; `low` and its gradient are what fp32 gives."""

    def __init__(self, device: str = "cpu", rows: int = ROWS) -> None:
        generator = torch.Generator().manual_seed(5)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        self.x, self.gradient = draw(rows, IN).bfloat16(), draw(rows, OUT).bfloat16()
        self.base = draw(rows, OUT).bfloat16()
        self.a, self.b = draw(RANK, IN) * IN**-0.5, draw(OUT, RANK) * 0.02
        self.low = F.linear(self.x.float(), self.a)
        self.of_low = self.gradient.float() @ self.b * SCALE


Product = Callable[[Given], Tensor]
# Of each product: in parts, and as fp32 gives it, which float64 gives rightly.
PRODUCTS: dict[str, tuple[Product, Callable[[Given, torch.dtype], Tensor]]] = {
    "low": (
        lambda g: low_rank.narrowed(g.x, g.a),
        lambda g, dtype: F.linear(g.x.to(dtype), g.a.to(dtype)),
    ),
    "added": (
        lambda g: low_rank.raised(g.low, g.b, SCALE, torch.float32),
        lambda g, dtype: F.linear(g.low.to(dtype), g.b.to(dtype)) * SCALE,
    ),
    "added, rounded": (
        lambda g: low_rank.raised(g.low, g.b, SCALE, torch.bfloat16).float(),
        lambda g, dtype: (F.linear(g.low.to(dtype), g.b.to(dtype)) * SCALE).bfloat16().to(dtype),
    ),
    "gradient of low": (
        lambda g: low_rank.back_raised(g.gradient, g.low, g.b, SCALE)[0],
        lambda g, dtype: (g.gradient.to(dtype) * SCALE) @ g.b.to(dtype),
    ),
    "gradient of B": (
        lambda g: low_rank.back_raised(g.gradient, g.low, g.b, SCALE)[1],
        lambda g, dtype: (g.gradient.to(dtype) * SCALE).t() @ g.low.to(dtype),
    ),
    "gradient of A": (
        lambda g: low_rank.back_narrowed(g.of_low, g.x, g.a)[1],
        lambda g, dtype: g.of_low.to(dtype).t() @ g.x.to(dtype),
    ),
    "gradient of x": (
        lambda g: low_rank.back_narrowed(g.of_low, g.x, g.a)[0].float(),
        lambda g, dtype: (g.of_low.to(dtype) @ g.a.to(dtype)).to(torch.bfloat16).to(dtype),
    ),
}

# To bf16: an output is as well, beside a packed base at once.
ROUNDED = ("added, rounded", "gradient of x")
# Left in fp32, five small products are in one sum with the large one: a device cuts them off there.
ON_DEVICE = [name for name in PRODUCTS if name != "added"]


def error(found: Tensor, right: Tensor) -> float:
    """Give the root of the mean square of what is wrong, relative to that of what is right."""
    return float((found.double() - right).norm() / right.norm())


def test_parts_are_the_matrix() -> None:
    wide = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 1e-3
    parts = low_rank.parts_of(torch.cat([wide, torch.tensor([0.0, 1.0, -3e38, 1e-30])]))
    assert all(part.dtype == torch.bfloat16 for part in parts)
    first, second, third = (part.double() for part in parts)
    assert torch.equal((first + second + third)[:1000], wide.double())
    assert not torch.equal((first + second)[:1000], wide.double())
    assert not torch.isfinite(sum(low_rank.parts_of(torch.tensor([torch.inf, torch.nan])))).any()


@pytest.mark.parametrize("name", PRODUCTS)
def test_errors_are_no_larger_than_those_of_fp32(name: str) -> None:
    check(name, Given())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ON_DEVICE)
def test_errors_are_no_larger_on_a_device(name: str) -> None:
    check(name, Given("cuda", rows=8192))


def check(name: str, given: Given, found: Tensor | None = None) -> None:
    in_parts, as_usual = PRODUCTS[name]
    found = in_parts(given) if found is None else found
    right = as_usual(given, torch.float64)
    if name in ROUNDED:  # which is wrong by that, whoever multiplies
        assert error(found, right) <= error(as_usual(given, torch.float32), right) + 1e-5
        return
    assert error(found, right) <= NO_WORSE * error(as_usual(given, torch.float32), right)


@pytest.mark.parametrize("name", [n for n in PRODUCTS if n not in ROUNDED])
def test_two_parts_are_not_enough(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, given = low_rank.parts_of, Given()

    def two(wide: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, second, third = raw(wide)
        return first, second, torch.zeros_like(third)

    monkeypatch.setattr(low_rank, "parts_of", two)
    in_parts, as_usual = PRODUCTS[name]
    right = as_usual(given, torch.float64)
    assert error(in_parts(given), right) > 3 * error(as_usual(given, torch.float32), right)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ON_DEVICE)
def test_a_compiler_leaves_parts_as_they_are(name: str) -> None:
    given = Given("cuda", rows=8192)
    check(name, given, compiled(PRODUCTS[name][0])(given))
