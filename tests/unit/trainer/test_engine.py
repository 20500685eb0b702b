"""The engine: what it refuses, what it reports, and what evaluation means."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from shardb import torch_adaptor
from tests.support.memory_training import MemoryTraining
from tests.support.tiny_model import TINY, TINY_TIED, micro_batches, random_rows
from trainer.engine import EngineOptions
from trainer.errors import InputError, NonFiniteError


def training(**options: Any) -> MemoryTraining:
    return MemoryTraining(TINY, EngineOptions(**options))


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"dtype": "fp64"}, "--dtype"),
        ({"grad_clip_mode": "local"}, "--grad-clip-mode"),
        ({"prefetch": "disk"}, "--prefetch"),
        ({"activations": "some"}, "--activations"),
        ({"weight_decay_scope": "none"}, "--weight-decay-scope"),
        ({"beta1": 1.0}, "--beta1"),
        ({"beta2": -0.1}, "--beta2"),
        ({"adam_eps": 0.0}, "--adam-eps"),
        ({"max_grad_norm": float("nan")}, "--max-grad-norm"),
        ({"max_grad_norm": 0.0}, "--max-grad-norm"),
        ({"weight_decay": -1.0}, "--weight-decay"),
        ({"lm_head_chunk_tokens": 0}, "--lm-head-chunk-tokens"),
    ],
)
def test_options_are_refused_by_flag(change: dict[str, Any], flag: str) -> None:
    with pytest.raises(InputError, match=flag):
        EngineOptions(**change)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (np.zeros((2, 1), dtype=np.int64), "give .rows >= 1, tokens >= 2"),
        (np.zeros((0, 9), dtype=np.int64), "give .rows >= 1, tokens >= 2"),
        (np.zeros(9, dtype=np.int64), "give .rows >= 1, tokens >= 2"),
        (np.zeros((2, TINY.max_position_embeddings + 2), dtype=np.int64), "positions"),
        (np.full((2, 9), TINY.vocab_size), "row 0, position 0 .* vocabulary of 131"),
        (np.full((2, 9), -1), "row 0, position 0"),
        (np.full((2, 9), -100), "no label"),
    ],
)
def test_bad_rows_are_refused(rows: np.ndarray, reason: str) -> None:
    run = training()
    with pytest.raises(InputError, match=reason):
        run.step([rows])


def test_every_shard_is_updated_and_one_is_active() -> None:
    result = training().step(micro_batches(1, 3))
    assert result.updated_shards == 6
    assert (result.max_active_param_shards, result.max_active_optimizer_shards) == (1, 1)
    assert set(result.shard_norms) == {
        "embeddings", "block_000", "block_001", "block_002", "final_norm", "lm_head"
    }  # fmt: skip
    assert result.tokens == 3 * 3 * 20
    assert result.valid_tokens == 3 * 3 * 20 - (4 + 8)


def test_tied_model_updates_its_one_matrix_once() -> None:
    run = MemoryTraining(TINY_TIED, EngineOptions())
    assert run.step(micro_batches(1, 2)).updated_shards == 5
    assert "params/lm_head" not in run.store.shards


@pytest.mark.parametrize("clip", ["global", "shard"])
def test_reading_ahead_counts_what_it_holds(clip: str) -> None:
    result = training(prefetch="cpu", grad_clip_mode=clip).step(micro_batches(1, 1))
    assert result.max_active_param_shards == 2
    assert result.max_active_optimizer_shards <= 2


def test_the_whole_norm_is_the_norm_of_the_shards() -> None:
    result = training().step(micro_batches(1, 1))
    assert result.grad_norm == pytest.approx(
        float(np.linalg.norm(list(result.shard_norms.values())))
    )
    assert result.clip_scale == pytest.approx(min(1.0, 1.0 / (result.grad_norm + 1e-6)))


def test_timings_are_of_this_step() -> None:
    timings = training().step(micro_batches(1, 1)).timings
    assert timings["backward_kernel_seconds"] > 0
    assert all(seconds >= 0 for seconds in timings.values())


def poison(run: MemoryTraining, shard: str, tensor: str, value: float) -> None:
    view = run.store.shards[shard]
    view.image.flags.writeable = True
    torch_adaptor.tensors(view)[tensor].view(-1)[0] = value
    view.image.flags.writeable = False


def test_a_loss_that_is_not_finite_names_where_it_began() -> None:
    run = training()
    poison(run, "params/block_001", "mlp.up_proj.weight", float("nan"))
    before = dict(run.store.shards)
    with pytest.raises(NonFiniteError, match="leave block_001") as stop:
        run.step(micro_batches(1, 1))
    assert stop.value.shard == "params/block_001"
    assert run.store.shards == before


def test_evaluation_does_not_depend_on_how_rows_are_batched() -> None:
    run = training()
    rows = random_rows(5, rows=20)
    rows[3, 4:9] = -100
    whole = run.engine.evaluate(run.store, [rows])
    parts = run.engine.evaluate(run.store, np.split(rows, 10))
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    assert (whole.tokens, whole.batches) == (20 * 20 - 5, 1)
    assert (parts.tokens, parts.batches) == (20 * 20 - 5, 10)


def test_evaluation_equals_the_training_loss_of_the_same_rows() -> None:
    run = training()
    rows = random_rows(5)
    assert run.engine.evaluate(run.store, [rows]).loss == run.step([rows]).loss


def test_evaluation_of_nothing_is_refused() -> None:
    run = training()
    with pytest.raises(InputError, match="--val-data-dir"):
        run.engine.evaluate(run.store, [])


def test_evaluation_reads_staged_values() -> None:
    run = training()
    rows = random_rows(5)
    txn = run.store.begin()
    before = run.engine.evaluate(txn, [rows]).loss
    run.engine.train_step(txn, [rows], step=1, learning_rate=1e-2)
    assert run.engine.evaluate(txn, [rows]).loss < before
    assert run.engine.evaluate(run.store, [rows]).loss == before


def test_logits_of_the_last_position_alone() -> None:
    run = training()
    ids = torch.from_numpy(random_rows(5))
    whole = run.engine.logits(run.store, ids)
    assert whole.shape == (3, 21, TINY.vocab_size)
    last = run.engine.logits(run.store, ids, last_only=True)
    assert torch.allclose(last[:, 0], whole[:, -1], atol=1e-6)


def test_logits_beyond_the_positions_are_refused() -> None:
    run = training()
    with pytest.raises(InputError, match="positions"):
        run.engine.logits(run.store, torch.zeros(1, 65, dtype=torch.int64))


def test_a_model_learns_rows_by_heart() -> None:
    run = MemoryTraining(replace(TINY, initializer_range=0.02), EngineOptions())
    rows = random_rows(5)
    first = run.step([rows], 3e-3).loss
    for _ in range(60):
        last = run.step([rows], 3e-3).loss
    assert first == pytest.approx(np.log(TINY.vocab_size), abs=0.1)
    assert last < 1.0
