"""Do blocks keep what their first pass computed where there is room, and is that foretold?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.adapters import imported_store
from tests.support.training import make_data
from trainer.budget import TENSORS, Budget
from trainer.ceiling import step_flops
from trainer.device import Device
from trainer.errors import InputError
from trainer.found import find_run
from trainer.lora import kept_way as choosing
from trainer.lora.budget import adapter_budget
from trainer.lora.forecast import step_operations
from trainer.placement_choice import BOUNDARIES
from trainer.plan import Plan, make_plan


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Give what a run with adapters is asked for."""
    root = tmp_path_factory.mktemp("eager")
    _, store = imported_store(root, "llama")
    data = make_data(root / "data")
    return {
        "store": str(store),
        "data_dir": str(data / "train"),
        "device": "cpu",
        "lora_rank": 4,
        "micro_batch_size": 4,
    }


def plan_of(asked: dict[str, Any], **more: Any) -> Plan:
    given = {**asked, **more}
    return make_plan(find_run(given), given, [])


def test_memory_decides_and_a_dry_run_says_why(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = plan_of(asked).budget
    assert kept.activations == "keep"
    assert "takes" in kept.activations_why
    again = plan_of(asked, activations="recompute").budget
    assert again.activations == "recompute"
    assert again.activations_why == "asked for by --activations"
    assert kept.memory[TENSORS] > again.memory[TENSORS]
    free = int(1.9 * kept.memory_bytes)
    monkeypatch.setattr(choosing, "machine_memory", lambda: (free, free))
    assert plan_of(asked).budget.activations == "recompute"
    assert "over half" in plan_of(asked).budget.activations_why
    assert plan_of(asked, activations="keep").budget == replace(
        kept, activations_why="asked for by --activations"
    )


def test_a_device_keeps_what_its_budget_has_room_for(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(asked)

    def way(**settings: Any) -> tuple[str, str]:
        assert plan.recipe.lora is not None
        asked = replace(plan.settings, **settings)
        found = adapter_budget(plan.recipe, plan.recipe.lora, asked, plan.store, copies=2)
        return found.activations, found.activations_why

    monkeypatch.setattr(Device, "is_host", False)
    assert way() == ("recompute", "no --vram-budget says how much of the device they may take")
    assert way(vram_budget="4GiB")[0] == "keep"
    few = way(vram_budget="34MiB")
    assert few[0] == "recompute"
    assert "of --vram-budget 35.65 MB" in few[1]
    assert way(vram_budget="4GiB", activation_placement="host")[0] == "recompute"


def test_what_is_for_compiled_blocks_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="--activations attention is for compiled blocks"):
        plan_of(asked, activations="attention")


def test_compiled_blocks_keep_what_attention_gave_where_it_may_wait(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(asked, compile_blocks=True)
    assert plan.budget.activations == "attention"

    def found(**settings: Any) -> Budget:
        assert plan.recipe.lora is not None
        asked = replace(plan.settings, **settings)
        return adapter_budget(plan.recipe, plan.recipe.lora, asked, plan.store, copies=2)

    monkeypatch.setattr(Device, "is_host", False)
    assert found().activations == "recompute"
    assert found(vram_budget="4GiB").activations == "attention"
    away = found(activation_placement="host")
    assert away.activations == "attention"
    assert "of memory" in away.activations_why
    plain = found(activation_placement="host", activations="recompute")
    model, recipe = plan.recipe.model, plan.recipe
    # Attention's output and the sum, in fp32, and a sum a head.
    tokens = recipe.micro_batch_size * recipe.seq_len * recipe.gradient_accumulation_steps
    left = 4 * tokens * (model.query_size + model.hidden_size + model.num_heads)
    assert away.boundary_bytes - plain.boundary_bytes == left * model.num_layers
    assert away.memory[BOUNDARIES] - plain.memory[BOUNDARIES] == left * model.num_layers
    few = found(activation_placement="host", pinned_budget="1MiB")
    assert few.activations == "recompute"
    assert "may be page-locked" in few.activations_why


def test_the_least_time_of_a_step_counts_what_is_kept(asked: dict[str, Any]) -> None:
    recipe = plan_of(asked).recipe
    tokens = recipe.rows_per_step * recipe.seq_len
    again, kept = (step_operations(recipe, way) for way in ("recompute", "keep"))
    width, inner = recipe.model.hidden_size, recipe.model.intermediate_size
    attention = recipe.model.num_heads * recipe.model.head_dim
    keys = recipe.model.num_kv_heads * recipe.model.head_dim
    # Queries and what comes out, keys and values, gate and up: once less each.
    products = 2 * width * (2 * attention + 2 * keys + 2 * inner)
    once = recipe.model.num_layers * (products + 4 * attention * recipe.seq_len)
    assert again - kept == once * tokens
    whole = replace(recipe, lora_rank=0)
    assert step_operations(whole, "keep") == step_flops(whole)
