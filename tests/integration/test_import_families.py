"""Does an imported model compute what transformers computes, in every family, bit for bit?

The tokens leave out the padding token: transformers never gives its row of the embedding a
gradient, and the native stages do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardb
from export.families import FAMILIES, places
from export.import_run import plan_import
from tests.support.packages import (
    FAMILY_NAMES,
    NATIVE,
    config_of,
    import_here,
    random_tensors,
    resident,
    stored_tensors,
    write_package,
)
from trainer.device import Device
from trainer.engine import Engine, EngineOptions
from trainer.model.config import ModelConfig
from trainer.model.stages import build_head, build_trunk
from trainer.model.stored import read_model

POSITIONS = 72
# The kernel of a norm over heads sums its weight's gradient in another order.
NORM_BOUND = 1e-5
CASES = [
    *[(name, "auto") for name in FAMILY_NAMES],
    *[(name, "transformers") for name in NATIVE],
]


def ids_of(rows: int = 2) -> Tensor:
    return torch.randint(3, 64, (rows, POSITIONS), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module", params=CASES, ids=" ".join)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Give a package, its store, and the resident model."""
    model_type, stages = request.param
    root = tmp_path_factory.mktemp("case")
    package = write_package(root / "package", config_of(model_type))
    import_here(package, root / "store", stages=stages)
    return package, root / "store", resident(package)


def model_of(store: Path) -> ModelConfig:
    with shardb.open(store) as opened, opened.at() as view:
        return read_model(view)


def store_logits(store: Path, ids: Tensor, dtype: str = "fp32") -> Tensor:
    with shardb.open(store) as opened, opened.at() as view:
        engine = Engine(read_model(view), EngineOptions(dtype=dtype), Device.from_name("cpu"))
        return engine.logits(view, ids)


def leaves(package: Path, store: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """Give fp32 leaves as params[stage][name], and the same by the package's names."""
    plan = plan_import(package)
    by_stage: dict[str, dict[str, Tensor]] = {}
    by_name = {}
    for name, tensor in stored_tensors(store).items():
        place = plan.places[name]
        by_name[name] = tensor.float().requires_grad_()
        by_stage.setdefault(place.stage, {})[place.tensor] = by_name[name]
    return by_stage, by_name


def passed(model: ModelConfig, params: dict[str, dict[str, Tensor]], ids: Tensor) -> Tensor:
    x = ids
    for stage in (*build_trunk(model), build_head(model)):
        x = stage.forward(params[stage.name], x)
    return x


def test_are_the_logits_bit_equal(case: Any) -> None:
    _, store, model = case
    with torch.no_grad():
        expected = model(ids_of()).logits
    assert torch.equal(store_logits(store, ids_of()), expected)


def test_are_the_gradients_bit_equal(case: Any) -> None:
    package, store, model = case
    by_stage, by_name = leaves(package, store)
    labels = ids_of().roll(-1, 1)
    for logits in (passed(model_of(store), by_stage, ids_of()), model(ids_of()).logits):
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    native = not model_of(store).hf_config
    for name, parameter in model.named_parameters():
        ours, theirs = by_name[name].grad, parameter.grad
        assert ours is not None
        assert float(theirs.abs().max()) > 0, name
        if native and name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.testing.assert_close(ours, theirs, rtol=NORM_BOUND, atol=1e-8)
        else:
            assert torch.equal(ours, theirs), name
    model.zero_grad()


def test_would_swapped_layers_be_noticed(case: Any, tmp_path: Path) -> None:
    package, store, _ = case
    tensors = stored_tensors(store)
    swapped = {
        name: tensors[name.replace(".0.", ".9.").replace(".1.", ".0.").replace(".9.", ".1.")]
        for name in tensors
    }
    other = write_package(tmp_path / "other", config_of(model_of_name(package)), swapped)
    import_here(other, tmp_path / "store")
    assert not torch.equal(
        store_logits(tmp_path / "store", ids_of()), store_logits(store, ids_of())
    )


def model_of_name(package: Path) -> str:
    return plan_import(package).source.model_type


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "gemma3_text", "phi3"])
def test_are_the_logits_bit_equal_in_bf16(model_type: str, tmp_path: Path) -> None:
    package = write_package(tmp_path / "package", config_of(model_type))
    import_here(package, tmp_path / "store")
    with torch.no_grad():
        expected = resident(package, torch.bfloat16)(ids_of()).logits
    assert torch.equal(store_logits(tmp_path / "store", ids_of(), "bf16"), expected)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("mistral", {"sliding_window": 8}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("llama", {"mlp_bias": True, "attention_bias": True}),
        ("llama", {"hidden_act": "gelu"}),
        (
            "llama",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 256},
        ),
        ("qwen3", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    ],
)
def test_is_what_native_stages_cannot_do_left_to_transformers(
    model_type: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    package = write_package(tmp_path / "package", config_of(model_type, **changes))
    import_here(package, tmp_path / "store")
    assert model_of(tmp_path / "store").hf_config
    with torch.no_grad():
        expected = resident(package)(ids_of()).logits
    assert torch.equal(store_logits(tmp_path / "store", ids_of()), expected)
    # A kind of rotary positions that changes with the length must not remember the last one.
    with torch.no_grad():
        short = resident(package)(ids_of()[:, :9]).logits
    assert torch.equal(store_logits(tmp_path / "store", ids_of()[:, :9]), short)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
        {"head_dim": 16, "num_key_value_heads": 4},
        {"num_key_value_heads": None},
    ],
)
def test_are_native_forms_of_llama_bit_equal(changes: dict[str, Any], tmp_path: Path) -> None:
    package = write_package(tmp_path / "package", config_of("llama", **changes))
    import_here(package, tmp_path / "store")
    assert not model_of(tmp_path / "store").hf_config
    with torch.no_grad():
        expected = resident(package)(ids_of()).logits
    assert torch.equal(store_logits(tmp_path / "store", ids_of()), expected)


def test_do_the_names_cover_every_supported_family() -> None:
    assert set(FAMILY_NAMES) == set(FAMILIES)
    for name, family in FAMILIES.items():
        model = plan_model(name)
        assert set(random_tensors(config_of(name))) == set(places(family, model))


def plan_model(name: str) -> ModelConfig:
    from export.import_config import read_model_config

    return read_model_config(config_of(name)).model
