"""Does a dry run count what a run writes to its durable store?"""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.budget import budget_of
from trainer.model.config import ModelConfig
from trainer.recipe import Recipe, Settings
from trainer.report import published_steps, report_json, report_text

MODEL = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=48,
)
RECIPE = Recipe(model=MODEL, data_digest="d", seq_len=16, seed=0, device="cpu", threads=1)


@pytest.mark.parametrize("stop", [0, 1, 2, 6, 7, 12, 30])
@pytest.mark.parametrize("every", [0, 1, 3, 4])
@pytest.mark.parametrize("snapshots", [0, 2, 6])
def test_published_steps_are_those_that_a_count_gives(
    stop: int, every: int, snapshots: int
) -> None:
    settings = Settings(
        data_dir="rows", max_steps=stop, durable_every=every, snapshot_every=snapshots
    )
    counted = {
        step
        for step in range(1, stop + 1)
        if step == stop or any(n and step % n == 0 for n in (every, snapshots))
    }
    assert published_steps(settings) == len(counted)


def test_an_active_run_writes_less_and_says_where_it_keeps_copies(tmp_path: Path) -> None:
    plain = Settings(data_dir="rows", max_steps=100)
    active = Settings(
        data_dir="rows", max_steps=100, active=str(tmp_path / "active"), durable_every=10
    )
    told = {}
    for settings in (plain, active):
        budget = budget_of(RECIPE, settings, tmp_path)
        told[settings] = report_json(RECIPE, settings, budget)["budget"]
        text = report_text(RECIPE, settings, budget)
        assert ("3 copies in" in text) == (settings is active)
        assert ("a published step" in text) == (settings is active)
        assert ("; one step in 10, snapshots, bests and" in text) == (settings is active)
    assert told[plain]["bytes_written"] == 10 * told[active]["bytes_written"]
    assert told[plain]["active_bytes"] == 0
    assert told[active]["active_bytes"] > 3 * told[active]["bytes_written_per_step"]
