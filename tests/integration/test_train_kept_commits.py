"""Does a run hold as many copies of its shards as the store's policy says, and predict them?

And what else lets a model run whose shards fit into memory just twice: no room is asked for
gradients that do not wait there, and first values are made by all processors.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import shardb
from shardb import branching
from shardb.retention import Policy
from tests.support.adapters import imported_store
from tests.support.memory_transaction import MemoryStore
from tests.support.tiny_model import TINY
from tests.support.training import arguments, make_data, train_here
from trainer.budget import budget_of
from trainer.device import Device
from trainer.engine import Engine, EngineOptions
from trainer.found import find_run
from trainer.model.initialise import fill_initial
from trainer.plan import make_plan
from trainer.recipe_build import DataFacts, new_run

STEPS = ("--max-steps", "5")


def store_keeping(folder: Path, commits: int) -> Path:
    with shardb.open(folder, create=True) as store:
        branching.set_policy(store, Policy(keep_last=commits))
    return folder


def held_bytes(store: Path) -> int:
    return sum(
        file.stat().st_size for name in ("objects", "spare") for file in (store / name).iterdir()
    )


def predicted(store: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, int]:
    """Give bytes of the store at most, and of one commit."""
    capsys.readouterr()
    assert train_here([*arguments(store, data), *STEPS, "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    line = next(line for line in told["budgets"] if line["name"] == "disk space")
    return int(line["needed"]), sum(told["shards"].values())


@pytest.mark.parametrize("kept", [1, 4])
def test_a_store_holds_what_its_policy_keeps_and_the_step_in_work(
    kept: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_data(tmp_path / "data")
    store = store_keeping(tmp_path / "run", kept)
    most, commit = predicted(store, data, capsys)
    assert train_here([*arguments(store, data), *STEPS]) == 0
    held = held_bytes(store)
    assert (kept + 1) * commit <= held <= most, (held, most, commit)
    default, _ = predicted(tmp_path / "new", data, capsys)
    assert most - default == (kept - Policy().keep_last) * commit


def test_adapters_are_predicted_by_the_policy_too(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data") / "train"
    _, imported = imported_store(tmp_path, "llama")
    given = {"store": str(imported), "data_dir": str(data), "device": "cpu", "lora_rank": 2}
    default = make_plan(find_run(given), given, []).budget
    store_keeping(imported, 6)
    more = make_plan(find_run(given), given, []).budget
    assert more.store_bytes - default.store_bytes == (6 - Policy().keep_last) * more.commit_bytes


def test_gradients_wait_in_host_memory_only_where_they_do() -> None:
    given = {"preset": "perkunas-v2.8-50m", "data_dir": "rows", "micro_batch_size": 8}
    facts = DataFacts(seq_len=512, digest="d" * 32, end_of_text_id=None)

    def waiting(**more: object) -> int:
        recipe, settings = new_run(
            {**given, "activations": "recompute", **more}, facts, device="cuda:0", threads=1
        )
        return budget_of(recipe, settings).memory["gradients"]

    everything = waiting(device_pipeline="off")
    assert waiting(gradient_placement="host") == everything
    assert waiting(gradient_placement="recompute") < everything / 4
    assert waiting(grad_clip_mode="shard", device_pipeline="off") < everything / 4


def test_stages_filled_side_by_side_have_the_values_of_one_after_the_other() -> None:
    store = MemoryStore()
    engine = Engine(TINY, EngineOptions(), Device.from_name("cpu"))
    txn = store.begin()
    engine.initialise(txn, 7)
    txn.commit()
    found, checked = store.arrays(), 0
    for stage in engine.stages:
        expected = {name: torch.empty(spec.shape) for name, spec in stage.specs.items()}
        fill_initial(stage, 7, expected)
        for name, tensor in expected.items():
            assert np.array_equal(found[f"params/{stage.name}:{name}"], tensor.numpy())
            checked += 1
    assert checked > len(engine.stages)
