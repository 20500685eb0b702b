"""Adapters in tests: random ones in a store, and the resident model that has the same.

`lora_B` is never left at zero: then an adapter that is passed by would not be noticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardb
from shardb import torch_adaptor
from tests.support.packages import config_of, import_here, write_package
from trainer.device import Device
from trainer.lora.engine import AdapterEngine
from trainer.lora.step import AdapterPass
from trainer.lora.visits import open_visits, read_adapters
from trainer.model.adapter_settings import LoraSettings
from trainer.model.stored import read_model
from trainer.options import EngineOptions
from trainer.timing import StepClock
from trainer.tokens import Tokens

Named = dict[str, Tensor]
# Every linear module of a block, as each family calls them.
TARGETS = {
    "phi": ("q_proj", "v_proj", "dense", "fc1", "fc2"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
}
USUAL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def settings_of(model_type: str, **changes: object) -> LoraSettings:
    """Give settings with every module of a family as target."""
    values = {"rank": 4, "alpha": 6.0, "targets": TARGETS.get(model_type, USUAL)}
    return LoraSettings(**{**values, **changes})  # type: ignore[arg-type]


def imported_store(root: Path, model_type: str, **how: str) -> tuple[Path, Path]:
    """Give a package of a family and the store that it was imported into."""
    package = write_package(root / "package", config_of(model_type))
    import_here(package, root / "store", **how)
    return package, root / "store"


def adapter_engine(
    store: Path,
    lora: LoraSettings,
    *,
    poison: bool = False,
    device: str = "cpu",
    **options: object,
) -> AdapterEngine:
    """Give the engine of a store's model."""
    with shardb.open(store) as opened, opened.at() as view:
        model = read_model(view)
    known = EngineOptions(**options)  # type: ignore[arg-type]
    return AdapterEngine(model, known, Device.from_name(device), lora, seed=3, poison=poison)


def plant_adapters(store: Path, engine: AdapterEngine, seed: int = 11, *, step: int = 1) -> Named:
    """Commit random adapters; give them by stage and name. None of them is zero."""
    generator = torch.Generator().manual_seed(seed)
    planted: Named = {}
    with shardb.open(store) as opened, opened.begin() as txn:
        for shard, specs in engine.shard_specs().items():
            tensors = {
                name: torch.zeros(spec.shape)
                if shard.startswith("optim/")
                else 0.1 * torch.randn(spec.shape, generator=generator)
                for name, spec in specs.items()
            }
            torch_adaptor.write(txn, shard, tensors)
            if shard.startswith("adapters/"):
                stage = shard.partition("/")[2]
                planted |= {f"{stage}:{name}": tensor for name, tensor in tensors.items()}
        txn.write("meta/recipe", {"json": np.zeros(1, np.uint8)}, trainable=False)
        txn.commit(step=step)
    assert planted
    assert all(bool(tensor.any()) for tensor in planted.values())
    return planted


def adapter_gradients(
    store: Path,
    engine: AdapterEngine,
    rows: Iterable[np.ndarray],
    drop_keys: Sequence[str | None] = (),
) -> tuple[float, Named]:
    """Give the loss and every gradient of the adapters, by stage and name."""
    model, clock = engine.adapted, StepClock()
    batches = [Tokens.from_rows(each, engine.config, engine.device) for each in rows]
    model.begin_pass(batches[0].ids.numel())
    with (
        shardb.open(store) as opened,
        opened.at() as view,
        open_visits(model, view, model.gradient_order(), clock) as visits,
    ):
        views = read_adapters(model, view)
        compute = model.step.compute(clock)
        taking = AdapterPass(model, visits, compute, views, drop_keys=drop_keys)
        found = {
            f"{ready.stage.name}:{name}": gradient.clone()
            for ready in taking.run(batches)
            for name, gradient in ready.gradients.items()
        }
    return taking.loss, found


class ResidentLora(nn.Module):
    """A linear module with an adapter, as `peft` computes it.

    rounds_first: as it does beside a packed base.
    """

    def __init__(
        self, base: nn.Module, a: Tensor, b: Tensor, scale: float, *, rounds_first: bool = False
    ) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Parameter(a.clone())
        self.lora_B = nn.Parameter(b.clone())
        self.scale = scale
        self.rounds_first = rounds_first

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        low = F.linear(F.linear(x.to(self.lora_A.dtype), self.lora_A), self.lora_B)
        added = low * self.scale
        if self.rounds_first:
            added = added.to(result.dtype)
        return (result + added).to(result.dtype)


def with_adapters(
    model: nn.Module, planted: Mapping[str, Tensor], scale: float, *, rounds_first: bool = False
) -> int:
    """Put the planted adapters into a resident model; give how many tensors found a place."""
    model.requires_grad_(False)
    count = 0
    layers = next(m for n, m in model.named_modules() if n.endswith("layers"))
    for key, a in planted.items():
        if not key.endswith("lora_A.weight"):
            continue
        stage, _, name = key.removesuffix(".lora_A.weight").partition(":")
        layer = layers[int(stage.removeprefix("block_"))]  # type: ignore[index]
        parent, _, child = name.rpartition(".")
        b = planted[f"{stage}:{name}.lora_B.weight"]
        owner = layer.get_submodule(parent)
        base = getattr(owner, child)
        setattr(owner, child, ResidentLora(base, a, b, scale, rounds_first=rounds_first))
        count += 2
    return count


def differing(found: Named, expected: Named) -> list[str]:
    """Give the names of tensors that are not the same to the last bit."""
    assert found.keys() == expected.keys()
    return [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


def resident_gradients(model: nn.Module) -> Named:
    """Give the gradients of a resident model's adapters, by stage and name."""
    found = {}
    layers = next(m for n, m in model.named_modules() if n.endswith("layers"))
    for index, layer in enumerate(layers):  # type: ignore[arg-type]
        for name, module in layer.named_modules():
            if isinstance(module, ResidentLora):
                for letter in "AB":
                    gradient = getattr(module, f"lora_{letter}").grad
                    found[f"block_{index:03d}:{name}.lora_{letter}.weight"] = gradient
    return found
