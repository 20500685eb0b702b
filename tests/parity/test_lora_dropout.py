"""Does dropout in adapters have one mask a module, micro-batch and step, whoever computes it?

The resident model draws its masks from the same seeds under ordinary autograd, which computes each
module once; a streamed stage is computed twice, and both times must drop the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.parity.test_lora_equals_resident import rows_of
from tests.support.adapters import (
    Named,
    ResidentLora,
    adapter_engine,
    adapter_gradients,
    differing,
    imported_store,
    plant_adapters,
    resident_gradients,
    settings_of,
    with_adapters,
)
from tests.support.packages import resident
from trainer.model.dropout import dropped
from trainer.model.micro_batch import MicroBatch, drop_keys

RATE = 0.25
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CASES = [
    *((name, "cpu") for name in ("llama", "phi3")),
    *(pytest.param((name, "cuda"), marks=CUDA) for name in ("llama", "phi3")),
]
BATCHES = [rows_of(2), rows_of(3)]
KEYS = drop_keys(RATE, seed=5, step=9, count=len(BATCHES))


class Dropping:
    """Has the adapters of a resident model drop with the masks of one micro-batch."""

    def __init__(self, model: Any) -> None:
        layers = next(m for n, m in model.named_modules() if n.endswith("layers"))
        self.key: str | None = None
        for index, layer in enumerate(layers):
            for name, module in layer.named_modules():
                if isinstance(module, ResidentLora):
                    module.forward = self._forward(module, f"block_{index:03d}", name)

    def _forward(self, module: ResidentLora, stage: str, name: str) -> Any:
        def forward(x: Tensor) -> Tensor:
            seed = MicroBatch(drop_key=self.key).drop_seed(stage, name)
            assert seed is not None
            result = module.base_layer(x)  # first: gradients of x are summed in reverse order
            low = F.linear(F.linear(dropped(x, RATE, seed), module.lora_A), module.lora_B)
            return result + low * module.scale

        return forward


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model_type, device = request.param
    lora = settings_of(model_type, dropout=RATE)
    package, store = imported_store(tmp_path_factory.mktemp("case"), model_type)
    engine = adapter_engine(store, lora, poison=True, device=device)
    planted = plant_adapters(store, engine)
    model = resident(package)
    assert with_adapters(model, planted, lora.scale) == len(planted) > 0
    return store, engine, model.to(device)


def resident_of(model: Any, keys: list[str | None]) -> tuple[float, Named]:
    dropping = Dropping(model)
    count, total = sum(rows[:, 1:].size for rows in BATCHES), 0.0
    for rows, key in zip(BATCHES, keys, strict=True):
        dropping.key = key
        place = next(model.parameters()).device
        parts = (rows[:, :-1], rows[:, 1:])
        ids, labels = (torch.from_numpy(part.copy()).to(place) for part in parts)
        loss = F.cross_entropy(model(ids).logits.flatten(0, 1), labels.flatten(), reduction="sum")
        (loss / count).backward()
        total += float(loss.detach())
    found = resident_gradients(model)
    model.zero_grad()
    return total / count, found


def test_are_loss_and_gradients_those_of_the_resident_model_with_the_same_masks(case: Any) -> None:
    store, engine, model = case
    loss, found = adapter_gradients(store, engine, BATCHES, KEYS)
    expected_loss, expected = resident_of(model, KEYS)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert differing(found, expected) == []
    assert adapter_gradients(store, engine, BATCHES, KEYS)[0] == loss


@pytest.mark.parametrize("wrong", ["step", "seed", "order", "none"])
def test_is_another_mask_noticed(case: Any, wrong: str) -> None:
    store, engine, model = case
    _, expected = resident_of(model, KEYS)
    keys: dict[str, list[str | None]] = {
        "step": drop_keys(RATE, seed=5, step=10, count=2),
        "seed": drop_keys(RATE, seed=6, step=9, count=2),
        "order": list(reversed(KEYS)),
        "none": [],
    }
    _, found = adapter_gradients(store, engine, BATCHES, keys[wrong])
    assert len(differing(found, expected)) == len(expected)


def test_a_mask_is_its_seeds_and_keeps_the_mean() -> None:
    x = torch.ones(64, 512)
    one = dropped(x, RATE, 7)
    assert torch.equal(one, dropped(x, RATE, 7))
    assert not torch.equal(one, dropped(x, RATE, 8))
    assert sorted(set(one.flatten().tolist())) == pytest.approx([0.0, 1 / (1 - RATE)])
    assert float((one == 0).float().mean()) == pytest.approx(RATE, abs=0.01)
    batch = MicroBatch(drop_key=KEYS[0])
    seeds = {batch.drop_seed(s, m) for s in ("block_000", "block_001") for m in ("q", "v")}
    assert len(seeds) == 4
    assert drop_keys(0.0, seed=1, step=1, count=2) == [None, None]
