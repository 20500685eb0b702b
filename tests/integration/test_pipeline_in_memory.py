"""Is what a pipeline's step commits in memory digested as it lies there, by threads beside it?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

import shardb
from shardb import ShardView, branching
from shardb.retention import Policy
from tests.support.stores import MEDIA, Medium
from tests.support.tiny_model import TINY, micro_batches
from trainer.device import Device
from trainer.engine import Engine, EngineOptions
from trainer.pipeline.footprint import PipelineSizes
from trainer.pipeline.pipeline import PipelineSettings
from trainer.pipeline.sealing import Sealer

STEPS = 6


@pytest.mark.parametrize("residents", [[], ["embeddings", "block_000"]])
def test_is_every_object_named_by_its_bytes(
    residents: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    filled = shardb.StagedShard.filled

    def noted(staged: shardb.StagedShard, size_bytes: int) -> None:
        told.append(staged.name)
        filled(staged, size_bytes)

    monkeypatch.setattr(shardb.StagedShard, "filled", noted)
    options = EngineOptions(max_grad_norm=1.0)
    engine = Engine(replace(TINY, num_layers=2), options, Device.from_name("cpu"))
    engine.use_pipeline(PipelineSettings(sizes=PipelineSizes(tile_elements=512)))
    pipeline = engine.pipeline
    assert pipeline is not None
    pipeline.sealer = Sealer(pipeline.lanes, in_background=True)
    with shardb.open(
        tmp_path / "run", create=True, files=Medium(MEDIA[1]), writer_threads=3
    ) as store:
        with store.begin("main") as txn:
            engine.initialise(txn, 1)
            txn.commit(step=0)
        branching.set_policy(store, Policy(keep_last=1))
        for step in range(1, STEPS + 1):
            if step == 3:
                pipeline.keep_resident(residents)
            with store.begin("main") as txn:
                engine.train_step(txn, micro_batches(step, 1), step=step, learning_rate=1e-3)
                commit = txn.commit(step=step)
            for entry in commit.shards.values():
                path = tmp_path / "run" / "objects" / f"{entry.digest}.safetensors"
                assert xxhash.xxh3_128_hexdigest(path.read_bytes()) == entry.digest
        with store.at(branch="main") as view:
            found = view.read("params/block_001")
            assert isinstance(found, ShardView)
            assert all(np.isfinite(array).all() for array in found.arrays().values())
        engine.close()
    assert "optim/block_000" in told  # digested in parts, not only when it was sealed
