"""Does a frozen base wait where there is room, with the reason, and never on a disk unknown?"""

from __future__ import annotations

import json
import re

import pytest

from tests.integration.test_lora_run import flags
from tests.support.adapters import imported_store, settings_of
from tests.support.training import make_data, train_here
from trainer.ceiling import Ceiling
from trainer.disk_kind import Disk
from trainer.errors import InputError
from trainer.found import find_run
from trainer.lora.base_tier import DISK_CACHE_BYTES, chosen_tier, tier_text
from trainer.lora.forecast import Bracket, bracket, token_operations
from trainer.model.stages import Block
from trainer.plan import Plan, make_plan

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


def test_the_bracket_is_of_operations_and_copies(asked: list[str]) -> None:
    recipe = plan_of(asked).recipe
    lora = settings_of("llama")
    rates = Ceiling(matmul_flops_per_second=1e9, copy_bytes_per_second=1e6)
    found = bracket(recipe, lora, 0, rates)
    assert found.most == pytest.approx(1e9 / token_operations(recipe, lora))
    assert found.least == pytest.approx(found.most / 2)
    assert Bracket(least=9.876, most=8041.7).text.startswith("9.88 to 8,040 tokens/s forecast")
    copied = bracket(recipe, lora, 5 * 10**8, rates)  # a thousand seconds a step
    tokens = recipe.rows_per_step * recipe.seq_len
    assert copied.most == pytest.approx(tokens / 1000)
    assert copied.least < copied.most
    more = settings_of("llama", rank=8)
    assert token_operations(recipe, more) > token_operations(recipe, lora)


def test_a_product_that_is_only_added_to_the_output_counts_twice(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, lora = plan_of(asked).recipe, settings_of("llama")
    model = recipe.model
    spared = token_operations(recipe, lora)
    monkeypatch.setattr(Block, "added_last", None)
    last = model.num_layers * model.hidden_size * model.intermediate_size
    assert token_operations(recipe, lora) - spared == 2 * last
