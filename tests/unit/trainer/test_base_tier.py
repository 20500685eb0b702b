"""Does a frozen base wait where there is room, with the reason, and never on a disk unknown?"""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from tests.integration.test_lora_run import flags
from tests.support.adapters import imported_store, settings_of
from tests.support.tiny_model import TINY
from tests.support.training import make_data, train_here
from trainer.ceiling import Ceiling
from trainer.device import Device
from trainer.disk_kind import Disk
from trainer.errors import InputError
from trainer.found import find_run
from trainer.lora.base_tier import DISK_CACHE_BYTES, chosen_tier, tier_text
from trainer.lora.forecast import Bracket, bracket_of, token_operations
from trainer.lora.pace import Pace, measure_pace
from trainer.lora.work import StepWork, step_work
from trainer.model.stages import Block
from trainer.options import EngineOptions
from trainer.plan import Plan, make_plan
from trainer.recipe import Recipe
from trainer.vram import StepShape

NVME = Disk(kind="nvme", why="nvme0n1")
TURNING = Disk(kind="rotating", why="sda")
UNKNOWN = Disk(kind="unknown", why="overlay")


@pytest.mark.parametrize(
    ("asked", "size", "disk", "kind", "words"),
    [
        ("auto", 10, UNKNOWN, "ram", "it fits"),
        ("ram", 10, UNKNOWN, "ram", "asked for"),
        ("auto", 200, NVME, "disk", "memory is too small.*read from nvme"),
        ("disk", 10, NVME, "disk", "asked for"),
        ("auto", 200, TURNING, "disk", "minutes a step"),
    ],
)
def test_the_tier_follows_from_size_and_room(
    asked: str, size: int, disk: Disk, kind: str, words: str
) -> None:
    tier = chosen_tier(asked, size, 100, disk, is_locked=False)
    assert tier.kind == kind
    assert re.search(words, tier_text(tier))
    assert (tier.cache_bytes == DISK_CACHE_BYTES) == (kind == "disk")


@pytest.mark.parametrize(
    ("asked", "size", "words"),
    [
        ("ram", 200, "--base-tier ram.*give auto or disk"),
        ("disk", 10, "its kind is not known .overlay.*--disk-kind"),
        ("auto", 200, "memory is too small.*--disk-kind"),
    ],
)
def test_what_cannot_be_is_refused(asked: str, size: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        chosen_tier(asked, size, 100, UNKNOWN, is_locked=True)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("tier")
    _, store = imported_store(root, "llama")
    return flags(store, make_data(root / "data"), "--max-steps", "2")


def test_a_dry_run_tells_where_the_base_waits_and_a_bracket(
    asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_here([*asked, "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    lines = {line["name"]: line for line in told["budgets"]}
    assert lines["frozen base"]["text"].startswith("base in memory: it fits")
    speed = lines["speed"]
    assert 0 < speed["tokens_per_second_least"] < speed["tokens_per_second_most"]
    assert "forecast" in speed["text"]
    assert "no promise" in lines["speed"]["text"]


def plan_of(asked: list[str], **more: object) -> Plan:
    pairs = dict(zip(asked[::2], asked[1::2], strict=True))
    given = {
        "store": pairs["--store"],
        "data_dir": pairs["--data-dir"],
        "device": "cpu",
        "lora_rank": 4,
        **more,
    }
    return make_plan(find_run(given), given, [])


def test_the_tier_changes_no_bit_and_no_recipe(asked: list[str]) -> None:
    plain = plan_of(asked)
    read_again = plan_of(asked, base_tier="disk", disk_kind="ssd")
    assert read_again.base_tier is not None
    assert read_again.base_tier.kind == "disk"
    assert read_again.recipe == plain.recipe
    assert any("as --disk-kind says" in note for note in read_again.notes)


def shape_of(recipe: Recipe, activations: str = "recompute") -> StepShape:
    return StepShape(
        model=recipe.model,
        options=EngineOptions(activations=activations),
        micro_batch_size=recipe.micro_batch_size,
        accumulation=recipe.gradient_accumulation_steps,
        seq_len=recipe.seq_len,
    )


def test_the_bracket_is_of_operations_calls_values_and_copies() -> None:
    rates = Ceiling(matmul_flops_per_second=100.0, copy_bytes_per_second=10.0)
    pace = Pace(call_seconds=2.0, value_seconds=0.5)
    work = StepWork(calls=3, values=4)

    def found(flops: float, copied: float, **how: bool) -> Bracket:
        kind = {"is_host": True, "is_compiled": False, **how}
        return bracket_of(1000, flops, copied, work, rates, pace, **kind)

    # Ten seconds of products, six of calls and two of values.
    least = 1000 / (20 + 3 * 6 + 2)
    assert found(1000, 0) == Bracket(least=least, most=pytest.approx(1000 / 17))
    # What is compiled asks for less than is counted.
    fewer = found(1000, 0, is_compiled=True)
    assert fewer == Bracket(least=pytest.approx(1000 / (20 + 6 + 2)), most=100)
    # A device does products, copies and half of the calls beside one another.
    device = {"is_host": False}
    assert found(1000, 0, **device) == Bracket(least=least, most=100)
    assert found(0, 0, **device).most == pytest.approx(1000 / 3)
    assert found(0, 500, **device) == Bracket(least=1000 / 70, most=20)


def test_what_is_kept_is_not_computed_again(asked: list[str]) -> None:
    recipe, lora = plan_of(asked).recipe, settings_of("llama")
    again, attention, kept = (
        token_operations(recipe.model, lora, recipe.seq_len, each)
        for each in ("recompute", "attention", "keep")
    )
    assert again > attention > kept
    more = settings_of("llama", rank=8)
    assert token_operations(recipe.model, more, recipe.seq_len) > token_operations(
        recipe.model, lora, recipe.seq_len
    )
    counted = step_work(shape_of(recipe), lora, is_host=True)
    assert step_work(shape_of(recipe, "keep"), lora, is_host=True).calls < counted.calls
    assert Bracket(least=9.876, most=8041.7).text.startswith("9.88 to 8,040 tokens/s forecast")


def test_work_follows_the_step(asked: list[str]) -> None:
    recipe, lora = plan_of(asked).recipe, settings_of("llama")
    shape = shape_of(recipe)
    one = step_work(shape, lora, is_host=True)
    twice = step_work(replace(shape, accumulation=2 * shape.accumulation), lora, is_host=True)
    assert one.calls < twice.calls < 2.1 * one.calls
    tokens = shape.micro_batch_size * shape.seq_len
    chunked = replace(shape, options=replace(shape.options, lm_head_chunk_tokens=tokens // 4))
    assert one.calls < step_work(chunked, lora, is_host=True).calls < 2 * one.calls
    wide = replace(shape, micro_batch_size=2 * shape.micro_batch_size)
    wider = step_work(wide, lora, is_host=True)
    assert wider.calls == one.calls
    assert 1.9 * one.values < wider.values < 2.1 * one.values


def test_a_pace_is_measured_through_the_code_that_trains() -> None:
    recipe = Recipe(
        model=TINY, data_digest="d", seq_len=20, seed=0, device="cpu", threads=1, micro_batch_size=3
    )
    found = measure_pace(shape_of(recipe), settings_of("llama"), Device.from_name("cpu"))
    assert 1e-7 < found.call_seconds < 1e-2
    assert 1e-12 < found.value_seconds < 1e-6


def test_a_product_that_is_only_added_to_the_output_counts_twice(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, lora = plan_of(asked).recipe, settings_of("llama")
    model = recipe.model
    spared = token_operations(recipe.model, lora, recipe.seq_len)
    monkeypatch.setattr(Block, "added_last", None)
    last = model.num_layers * model.hidden_size * model.intermediate_size
    assert token_operations(recipe.model, lora, recipe.seq_len) - spared == 2 * last
