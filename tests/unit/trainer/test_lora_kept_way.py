"""Do blocks keep what their first pass computed where there is room, and is that foretold?"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from tests.support.adapters import imported_store
from tests.support.training import make_data
from trainer import budget as budgets
from trainer.budget import TENSORS, Budget, check_memory, step_shape
from trainer.ceiling import step_flops
from trainer.device import Device
from trainer.errors import InputError
from trainer.found import find_run
from trainer.lora import kept_way as choosing
from trainer.lora.budget import adapter_budget
from trainer.lora.forecast import step_operations
from trainer.lora.need import adapter_need
from trainer.placement_choice import BOUNDARIES
from trainer.plan import Plan, make_plan
from trainer.preflight import preflight
from trainer.sizes import in_bytes


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
        kept,
        activations_why="asked for by --activations",
        kept_bytes=kept.memory_bytes - again.memory_bytes,
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


def test_who_asks_to_keep_too_much_is_told_which_flag_it_is(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = plan_of(asked, activations="keep").budget
    again = plan_of(asked, activations="recompute").budget
    rank = {**asked, "lora_rank": 0}  # the same of whole weights
    for one, other in (
        (kept, again),
        (plan_of(rank, activations="keep").budget, plan_of(rank, activations="recompute").budget),
    ):
        room = (one.memory_bytes + other.memory_bytes) // 2
        monkeypatch.setattr(budgets, "machine_memory", lambda room=room: (room, room))
        needs = in_bytes(other.memory_bytes)
        flag = f"give --activations auto or recompute, which needs about {needs}"
        with pytest.raises(InputError, match=f": {re.escape(flag)}, or lower --micro-batch-size"):
            check_memory(one)
        # It is no remedy where that does not fit either, nor where nobody asked.
        monkeypatch.setattr(budgets, "machine_memory", lambda: (1 << 20, 1 << 20))
        for budget in (one, other):
            with pytest.raises(InputError, match=r": lower --micro-batch-size") as refused:
                check_memory(budget)
            assert "--activations" not in refused.value.message


def test_lines_of_the_preflight_name_the_flag_too(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(asked, compile_blocks=True)
    recipe = replace(plan.recipe, gradient_accumulation_steps=4)
    assert recipe.lora is not None
    monkeypatch.setattr(Device, "is_host", False)
    monkeypatch.setattr(Device, "memory_bytes", lambda _: (1 << 40, 1 << 40))

    def remedies(activations: str, **more: Any) -> dict[str, str]:
        assert recipe.lora is not None
        settings = replace(plan.settings, activations=activations, **more)
        budget = adapter_budget(recipe, recipe.lora, settings, plan.store, copies=2)
        lines = preflight(recipe, settings, budget, plan.store)
        return {line.name: line.remedy for line in lines}

    flag = "give --activations auto or recompute"
    away = {"activation_placement": "host"}
    for name in ("host memory", "page-locked memory"):
        assert remedies("attention", **away)[name].startswith(flag)
        for way in ("auto", "recompute"):
            assert flag not in remedies(way, **away)[name]
    few = remedies("attention", **away, pinned_budget="1KiB")["page-locked memory"]
    assert few == "raise --pinned-budget"
    shape = step_shape(recipe, plan.settings, "recompute")
    free = adapter_need(shape, recipe.lora, None).most_bytes
    monkeypatch.setattr(Device, "memory_bytes", lambda _: (free, free))
    assert remedies("attention")["device memory"].startswith(f"{flag}, which needs about")
    monkeypatch.setattr(Device, "memory_bytes", lambda _: (free - 1, free))
    assert remedies("attention")["device memory"].startswith("lower --micro-batch-size")
    assert "--fit" not in remedies("attention")["device memory"]


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
