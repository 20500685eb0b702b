"""Is the place of updates chosen by speed, kept with the run, and refused where it cannot be?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardb
from tests.support.tiny_model import TINY
from tests.support.training import arguments, make_data, step_records, train_here
from trainer import update_place
from trainer.engine import EngineOptions
from trainer.errors import InputError
from trainer.host_walk import predicted_host_bytes
from trainer.optimizers.placement import (
    UpdateRates,
    chosen_place,
    host_share_beside_link,
    host_stages,
)
from trainer.recipe import Recipe, Settings
from trainer.run_shards import read_recipe
from trainer.update_place import updates_placed
from trainer.vram import StepShape

RECIPE = Recipe(model=TINY, data_digest="d", seq_len=20, seed=0, device="cpu", threads=1)
SETTINGS = Settings(data_dir="d")
SPLIT: dict[str, Any] = {"optimizer_device": "split", "optimizer_host_stages": ("block_001",)}


def never(*_arguments: object) -> UpdateRates:
    raise AssertionError("nothing is to be measured")


@pytest.mark.parametrize(
    ("host", "device", "place"),
    [(1e9, 1e9, "split"), (1e9, 1e11, "gpu"), (1e11, 1e9, "cpu"), (1e9, 1e10, "split")],
)
def test_the_fastest_place_is_chosen(host: float, device: float, place: str) -> None:
    assert chosen_place(UpdateRates(host=host, device=device)) == place


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_a_split_has_its_share_at_every_point(share: float) -> None:
    order = [("head", 70), *((f"block_{i:03}", 40) for i in range(20)), ("embeddings", 70)]
    chosen = set(host_stages(order, share))
    seen = taken = 0
    for name, size in order:
        seen += size
        taken += size if name in chosen else 0
        assert abs(taken - share * seen) <= 70
    assert len(chosen) == {0.0: 0, 1.0: len(order)}.get(share, len(chosen))


def test_auto_on_a_processor_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_place, "_measured", never)
    recipe, said = updates_placed(
        replace(RECIPE, optimizer_device="auto"), SETTINGS, None, lambda _: None
    )
    assert (recipe.optimizer_device, said) == ("gpu", [])


def test_a_run_that_goes_on_keeps_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_place, "_measured", never)
    stored = replace(RECIPE, **SPLIT)
    for wanted in ("auto", "split"):
        asked = replace(stored, optimizer_device=wanted)
        assert updates_placed(asked, SETTINGS, stored, lambda _: None)[0] == stored
    other = updates_placed(replace(stored, optimizer_device="cpu"), SETTINGS, stored, print)[0]
    assert (other.optimizer_device, other.optimizer_host_stages) == ("cpu", ())


def test_the_pipeline_keeps_its_updates_unless_asked() -> None:
    piped = replace(SETTINGS, device_pipeline="on", activations="recompute")
    for wanted, place in (("auto", "gpu"), ("cpu", "cpu"), ("split", "split")):
        asked = replace(RECIPE, optimizer_device=wanted)
        found = updates_placed(asked, piped, None, lambda _: None)[0]
        assert found.optimizer_device == place
        assert bool(found.optimizer_host_stages) is (place == "split")


def test_a_split_beside_a_link_follows_its_speed() -> None:
    """As fast a processor as 50 GB/s feed: 16 bytes a parameter against 8 and an update."""
    assert host_share_beside_link(4e9, 50e9) == pytest.approx(0.32 / (0.5 + 0.16))
    assert host_share_beside_link(4e9, 500e9) < 0.1
    assert host_share_beside_link(4e9, 1e9) == 1.0


def test_recipes_from_before_keep_their_bytes() -> None:
    assert b"optimizer_device" not in RECIPE.to_bytes()
    split = replace(RECIPE, **SPLIT)
    assert Recipe.from_bytes(split.to_bytes()) == split != RECIPE
    with pytest.raises(InputError, match="--optimizer-device"):
        replace(RECIPE, optimizer_device="gpus")


def test_gradients_of_updates_under_way_are_counted() -> None:
    shape = StepShape(
        model=replace(TINY, num_layers=5),
        options=EngineOptions(grad_clip_mode="shard"),
        micro_batch_size=1,
        accumulation=1,
        seq_len=4,
    )
    on_host = replace(shape, options=replace(shape.options, optimizer_device="cpu"))
    assert predicted_host_bytes(on_host) > predicted_host_bytes(shape)


def test_a_split_run_makes_the_same_shards_on_a_processor_and_resumes(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    plain, split = tmp_path / "plain", tmp_path / "split"
    assert train_here(arguments(plain, data, "--max-steps", "4")) == 0
    flags = ("--max-steps", "2", "--optimizer-device", "split")
    assert train_here(arguments(split, data, *flags)) == 0
    assert train_here(arguments(split, None, "--max-steps", "4")) == 0
    assert step_shards(plain) == step_shards(split)
    with shardb.open(split) as store, store.at(branch="main") as view:
        stored = read_recipe(view)
    assert stored.optimizer_device == "split"
    assert 0 < len(stored.optimizer_host_stages) < 4


def step_shards(store: Path) -> dict[int, dict[str, str]]:
    """Give the digests of every step's weights and state."""
    return {
        step: {n: digest for n, digest in record.shards.items() if not n.startswith("meta/")}
        for step, record in step_records(store).items()
    }
