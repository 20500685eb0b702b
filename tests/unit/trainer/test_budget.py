"""Are the budgets right, and is the one that does not fit refused by name?"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from shardb.errors import StorageFullError
from trainer import budget as budgets
from trainer import placement_choice as choosing
from trainer.budget import COPIES, HOLES, TENSORS, Budget, budget_of, check_memory, check_space
from trainer.errors import InputError
from trainer.placement_choice import placed, run_boundary_bytes
from trainer.recipe import Recipe, Settings
from trainer.recipe_build import DataFacts, new_run
from trainer.sizes import in_bytes

DATA = DataFacts(seq_len=512, digest="d" * 32, end_of_text_id=None)


def run_of(**given: object) -> tuple[Recipe, Settings]:
    given = {"preset": "perkunas-v2.8-50m", "data_dir": "rows", **given}
    given.setdefault("micro_batch_size", 8)
    return new_run(given, DATA, device="cpu", threads=1)


def test_the_store_holds_three_copies_and_the_snapshots() -> None:
    budget = budget_of(*run_of())
    # Parameters and two moments, four bytes each, and at most two pages of header a shard.
    least = 3 * 4 * budget.parameter_count
    assert least < budget.commit_bytes <= least + len(budget.shards) * 8192
    pinned = budget_of(*run_of(max_steps=1000, snapshot_every=100))
    assert pinned.snapshots == 10
    ended = budget_of(*run_of(max_steps=1000))
    assert pinned.store_bytes - ended.store_bytes == 10 * budget.commit_bytes
    assert budget.store_bytes > COPIES * budget.commit_bytes


def test_memory_grows_where_it_should() -> None:
    recipe, settings = run_of(activations="recompute")
    base = budget_of(recipe, settings).memory
    rows = budget_of(replace(recipe, gradient_accumulation_steps=4), settings).memory
    more = 3 * run_boundary_bytes(recipe)
    assert more <= rows[TENSORS] - base[TENSORS] <= 1.1 * more
    chunk = budget_of(replace(recipe, lm_head_chunk_tokens=512), settings).memory
    assert chunk[TENSORS] < base[TENSORS]
    shard = budget_of(
        replace(recipe, grad_clip_mode="shard", lm_head_chunk_tokens=512), settings
    ).memory
    assert shard[TENSORS] < chunk[TENSORS]
    assert all(memory[HOLES] > memory[TENSORS] for memory in (base, rows, chunk, shard))


def test_activations_are_kept_only_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, settings = run_of()
    monkeypatch.setattr(budgets, "machine_memory", lambda: (64 << 30, 64 << 30))
    kept = budget_of(recipe, settings)
    monkeypatch.setattr(budgets, "machine_memory", lambda: (2 << 30, 2 << 30))
    recomputed = budget_of(recipe, settings)
    assert (kept.activations, recomputed.activations) == ("keep", "recompute")
    assert kept.memory_bytes > recomputed.memory_bytes
    asked = replace(settings, activations="keep")
    more = kept.memory_bytes - recomputed.memory_bytes
    assert budget_of(recipe, asked) == replace(kept, kept_bytes=more)
    other = replace(recipe, device="cuda:0")
    monkeypatch.setattr(budgets, "machine_memory", lambda: (64 << 30, 64 << 30))
    assert budget_of(other, settings).activations == "recompute"


def small_budget(**memory: int) -> Budget:
    return Budget(parameter_count=1, shards={"params/a": 1 << 20}, snapshots=0, memory=memory)


def test_memory_that_is_not_there_is_refused_and_memory_in_use_is_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(budgets, "machine_memory", lambda: (8 << 30, 2 << 30))
    assert check_memory(small_budget(gradients=1 << 30)) is None
    warning = check_memory(small_budget(gradients=1 << 30, logits=3 << 30))
    assert warning is not None
    assert "logits" in warning
    with pytest.raises(InputError, match="gradients"):
        check_memory(small_budget(gradients=9 << 30, logits=1))


def test_what_the_store_holds_already_counts_as_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = small_budget(gradients=1)
    monkeypatch.setattr(budgets, "_free_bytes", lambda _: 1 << 20)
    with pytest.raises(StorageFullError) as caught:
        check_space(budget, tmp_path / "not" / "there")
    assert caught.value.exit_code == 6
    assert in_bytes(budget.store_bytes) in str(caught.value)
    (tmp_path / "objects").mkdir()
    with open(tmp_path / "objects" / "one", "wb") as file:
        file.truncate(budget.store_bytes)
    check_space(budget, tmp_path)
    assert budget.store_bytes > 1 << 20


def test_log_and_index_are_asked_for_as_a_run_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of a few steps does not need what one without an end may; what is there is counted."""
    few, many, endless = (budget_of(*run_of(max_steps=stop)) for stop in (10, 10**6, None))
    assert few.overhead_bytes < endless.overhead_bytes / 4
    assert many.overhead_bytes == endless.overhead_bytes == budgets.STORE_OVERHEAD_BYTES
    budget = small_budget(gradients=1)
    monkeypatch.setattr(budgets, "_free_bytes", lambda _: 1 << 20)
    for name in ("objects", "wal", "index"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "one").write_bytes(bytes(1000))
    with pytest.raises(StorageFullError, match=r"raise --snapshot-every.*`shardb pack`.*clone"):
        check_space(budget, tmp_path)
    os.truncate(tmp_path / "wal" / "one", budget.store_bytes)
    check_space(budget, tmp_path)


def test_files_that_a_live_writer_renames_are_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = tmp_path / "objects"
    objects.mkdir()
    for name in ("gone", "stays"):
        (objects / name).write_bytes(bytes(1000))
    listed = [*os.scandir(objects)]
    (objects / "gone").unlink()
    monkeypatch.setattr("os.scandir", lambda _: listed)
    assert budgets._held_bytes(tmp_path) == 1000


def test_the_place_of_boundaries_is_the_first_that_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, settings = run_of(activations="recompute", gradient_accumulation_steps=8)
    budget = budget_of(recipe, settings)
    monkeypatch.setattr(choosing, "is_ram_disk", lambda _: False)
    monkeypatch.setattr(choosing, "room_bytes", lambda _: 1 << 50)

    def place_with(free_bytes: int, placement: str = "auto") -> Budget:
        monkeypatch.setattr(choosing, "machine_memory", lambda: (1 << 50, free_bytes))
        wanted = replace(settings, activation_placement=placement)
        return placed(budget, recipe, wanted, tmp_path)

    roomy, tight = place_with(1 << 40), place_with(budget.memory_bytes - 1)
    assert (roomy.placement, tight.placement) == ("vram", "spill")
    # The gradients of one stage and one micro-batch's tensors stay in memory.
    saved = roomy.memory[TENSORS] - tight.memory[TENSORS]
    assert 0.7 * tight.spill_bytes < saved <= tight.spill_bytes == run_boundary_bytes(recipe)
    assert "free" in tight.placement_why
    asked = place_with(1 << 40, "spill")
    assert asked.placement == "spill"
    assert "--activation-placement" in asked.placement_why
    monkeypatch.setattr(choosing, "room_bytes", lambda _: 1)
    assert place_with(budget.memory_bytes - 1).placement == "vram"
