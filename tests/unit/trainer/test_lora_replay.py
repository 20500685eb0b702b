"""Is a block that is computed again for its gradients spared the product that nobody asks for?

The compiled way is taken here with functions that are left as they are: its gradients are then
those of PyTorch's own kernels but for the rounding of products that adapters share.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.adapters import (
    USUAL,
    Named,
    adapter_engine,
    adapter_gradients,
    differing,
    imported_store,
    plant_adapters,
    settings_of,
)
from trainer.lora import compiled, stages
from trainer.lora.engine import AdapterEngine

ATTENTION = ("q_proj", "v_proj")
BATCHES = 2


class LastProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts products of what a gate lets through with a block's last matrix."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self._shape = shape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.mm.default and _is_forward(args[1], self._shape):
            self.count += 1
        return func(*args, **(kwargs or {}))


def _is_forward(matrix: torch.Tensor, shape: tuple[int, ...]) -> bool:
    """Say whether it is the last matrix on its way forward: what goes back is not turned."""
    return tuple(matrix.shape) == shape and not matrix.is_contiguous()


def run(store: Path, engine: AdapterEngine) -> tuple[Named, int]:
    """Give all gradients, and how many last products were made."""
    width, inner = engine.config.hidden_size, engine.config.intermediate_size
    rows = [np.random.default_rng(seed).integers(3, 64, (2, 41)) for seed in range(BATCHES)]
    with LastProducts((inner, width)) as products:
        _, found = adapter_gradients(store, engine, rows)
    return found, products.count


def left_as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@pytest.mark.parametrize("targets", [ATTENTION, USUAL], ids=["cut", "whole"])
def test_the_last_product_is_made_once(
    targets: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, store = imported_store(tmp_path, "llama")
    lora = settings_of("llama", targets=targets)
    engine = adapter_engine(store, lora, poison=True)
    plant_adapters(store, engine)
    once = BATCHES * engine.config.num_layers
    found, count = run(store, engine)
    assert count == once

    monkeypatch.setattr(compiled, "compiled_closed", left_as_it_is)
    through, count = run(store, adapter_engine(store, lora, poison=True, compile_blocks=True))
    assert count == once
    assert all(
        torch.allclose(found[name], gradient, rtol=1e-4) for name, gradient in through.items()
    )

    monkeypatch.setattr(stages.AdaptedStage, "_unasked", lambda *_given: {})
    always, count = run(store, engine)
    assert count == 2 * once
    assert differing(found, always) == []
