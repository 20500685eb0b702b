"""Are loss and gradient of a frozen head those of PyTorch's own functions, where logits lie?

What is compiled on a device is called here as it is.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.adapters import (
    adapter_engine,
    adapter_gradients,
    imported_store,
    plant_adapters,
    settings_of,
)
from tests.unit.trainer.test_lora_updating import rows_of
from trainer.device import Device
from trainer.head import IGNORED_LABEL
from trainer.lora import compiled_head
from trainer.lora.compiled_head import CompiledHead, gradient_in_place
from trainer.lora.feeding import DeviceBase
from trainer.model.compiled import compiled_closed

ROWS, VOCABULARY = 32, 500
# Of powers of fp32 numbers around ten.
EXPONENTS = 2e-6


def drawn(dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Give logits, labels of which some do not count, and a seed."""
    generator = torch.Generator().manual_seed(4)
    logits = 8 * torch.randn(ROWS, VOCABULARY, generator=generator)
    labels = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    labels[::5] = IGNORED_LABEL
    seed = torch.full((), 1.0, device=device) / 29
    return logits.to(dtype).to(device), labels.to(device), seed


def expected(logits: Tensor, labels: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.double().requires_grad_()
    loss = F.cross_entropy(leaf, labels, ignore_index=IGNORED_LABEL, reduction="sum")
    [gradient] = torch.autograd.grad(loss, leaf, grad_outputs=seed.double())
    return gradient, loss.detach()


def is_near(dtype: torch.dtype, found: Tensor, loss: Tensor, given: tuple[Tensor, ...]) -> bool:
    """Say whether both are right, to the rounding of a dtype and of fp32."""
    gradient, right_loss = expected(*given)
    off = (found.double() - gradient).norm() / gradient.norm()
    return bool(
        off < max(torch.finfo(dtype).eps, EXPONENTS) and (loss / right_loss - 1).abs() < 1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_become_their_gradient(dtype: torch.dtype) -> None:
    given = drawn(dtype)
    logits = given[0].clone()
    loss = gradient_in_place(logits, *given[1:])
    assert is_near(dtype, logits, loss, given)
    assert not logits[::5].any()
    turned = (given[0], given[1].roll(1), given[2])
    assert not is_near(dtype, logits, loss, turned)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_logits_become_their_gradient() -> None:
    given = drawn(torch.bfloat16, "cuda")
    logits = given[0].clone()
    loss = compiled_closed(gradient_in_place)(logits, *given[1:])
    assert is_near(torch.bfloat16, logits, loss, given)


def test_a_step_has_the_gradients_of_the_usual_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, store = imported_store(tmp_path, "llama")
    engine = adapter_engine(store, settings_of("llama"), lm_head_chunk_tokens=7)
    plant_adapters(store, engine)
    base = DeviceBase(Device.from_name("cpu"), engine.options.torch_dtype)
    object.__setattr__(engine.adapted, "base", base)
    loss, usual = adapter_gradients(store, engine, rows_of(1))
    monkeypatch.setattr(compiled_head, "compiled_closed", lambda function: function)
    object.__setattr__(engine.adapted, "head_work", CompiledHead())
    found_loss, found = adapter_gradients(store, engine, rows_of(1))
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert found.keys() == usual.keys()
    assert all(
        torch.allclose(found[name], gradient, rtol=1e-3, atol=1e-7)
        for name, gradient in usual.items()
    )
    assert any(not torch.equal(found[name], gradient) for name, gradient in usual.items())
