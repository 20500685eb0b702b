"""Is a frozen base that computes in another dtype copied once, where there is room, for no bit?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardb
from tests.parity.test_lora_equals_resident import rows_of
from tests.support.adapters import (
    adapter_engine,
    adapter_gradients,
    differing,
    imported_store,
    plant_adapters,
    settings_of,
)
from tests.support.training import make_data, step_records, train_here
from tests.unit.trainer.test_lora_kept_way import plan_of
from trainer.lora import base_copies
from trainer.lora.base_copies import COPIES, copied_bytes
from trainer.lora.engine import AdapterEngine


@pytest.fixture
def asked(tmp_path: Path) -> dict[str, Any]:
    """Give what a run in fp32 beside a base in bf16 is asked for."""
    _, store = imported_store(tmp_path, "llama")
    data = make_data(tmp_path / "data")
    given = {"store": str(store), "data_dir": str(data / "train"), "device": "cpu"}
    return {**given, "lora_rank": 4, "dtype": "fp32"}


def test_copies_change_nothing_and_take_what_is_foretold(asked: dict[str, Any]) -> None:
    store, lora, rows = Path(asked["store"]), settings_of("llama"), [rows_of(1), rows_of(2)]
    recipe = plan_of(asked).recipe
    plain = adapter_engine(store, lora)
    given = (plain.config, plain.options, plain.device, lora)
    copying = AdapterEngine(*given, seed=3, copies_base=True)
    plant_adapters(store, plain)
    expected_loss, expected = adapter_gradients(store, plain, rows)
    for _ in range(2):
        loss, found = adapter_gradients(store, copying, rows)
        assert loss == expected_loss
        assert differing(found, expected) == []
    assert plain.adapted.pool.filled_bytes > copying.adapted.pool.filled_bytes == 0
    with shardb.open(store) as opened:
        stored = {name: entry.bytes for name, entry in opened.branches()["main"].shards.items()}
    copies = copying.adapted.pool._copies
    assert copies is not None
    held = sum(shard.form.bytes for shard in copies._kept.values())
    assert held == copied_bytes(recipe, lora, stored) > 0


def test_room_decides_and_memory_counts_them(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = plan_of(asked).budget
    assert budget.copies_base
    assert budget.memory[COPIES] > 0
    others = (
        {"dtype": "bf16"},
        {"poison_buffers": True},
        {"base_tier": "disk", "disk_kind": "ssd"},
    )
    for other in others:
        without = plan_of(asked, **other).budget
        assert not without.copies_base
        assert COPIES not in without.memory
    free = 2 * budget.memory_bytes - 2
    monkeypatch.setattr(base_copies, "machine_memory", lambda: (free, free))
    assert not plan_of(asked).budget.copies_base


def test_a_run_with_copies_stages_the_same_shards(asked: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for name, more in (("copied", ()), ("again", ("--base-tier", "disk", "--disk-kind", "ssd"))):
        _, store = imported_store(tmp_path / name, "llama")
        flags = [f"--data-dir={asked['data_dir']}", "--device=cpu"]
        flags += ["--lora-rank=4", "--threads=1", "--max-steps=2", "--micro-batch-size=2"]
        assert train_here([f"--store={store}", *flags, *more]) == 0
        shards = step_records(store)[2].shards
        found.append({n: digest for n, digest in shards.items() if "meta/" not in n})
    assert found[0] == found[1]
    assert found[0]
