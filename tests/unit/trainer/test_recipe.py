"""Does a recipe hold what decides the bits, refuse what is wrong, and change only where it may?"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

from trainer.errors import InputError
from trainer.host_memory import machine_memory
from trainer.model.config import ModelConfig
from trainer.recipe import Recipe, Settings
from trainer.recipe_build import (
    PRESET_TRAINING,
    DataFacts,
    changes,
    check_given,
    idle_notes,
    new_model,
    new_run,
    resumed_run,
)
from trainer.recipe_flags import FLAGS, Scope, fields_of
from trainer.recipe_options import NOT_THE_ENGINES, options_of

DATA = DataFacts(seq_len=16, digest="d" * 32, end_of_text_id=0)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "intermediate_size": 32,
}


def begin(**given: Any) -> tuple[Recipe, Settings]:
    return new_run({"data_dir": "rows", **SIZES, **given}, DATA, device="cpu", threads=1)


def test_every_field_of_recipe_and_settings_has_a_flag_or_comes_from_the_data() -> None:
    flags = {flag.field for flag in FLAGS}
    names = {f.name for record in (Recipe, Settings) for f in fields(record)}
    found = {"model", "data_digest", "records_apart"}
    assert names - flags == found | {"optimizer_host_stages"}, "a plan finds these"
    config = {f.name for f in fields(ModelConfig)}
    assert config - fields_of(Scope.MODEL) == {"hf_config"}, "an import alone sets it"


def test_flags_are_named_once_and_explained() -> None:
    names = [name for flag in FLAGS for name in flag.names]
    assert len(names) == len(set(names))
    assert all(flag.help.endswith(".") for flag in FLAGS)


def test_a_recipe_reads_back_as_it_was_written() -> None:
    recipe, settings = begin(learning_rate=1.1e-5, seed=2**62, beta1=0.1 + 0.2)
    assert Recipe.from_bytes(recipe.to_bytes()) == recipe
    assert Settings.from_json(json.loads(json.dumps(settings.to_json()))) == settings


def test_the_digest_knows_every_bit_and_no_path_or_stop() -> None:
    recipe, _ = begin()
    same, _ = begin(data_dir="elsewhere", max_steps=20, validate_every=3, prefetch_shards="cpu")
    assert same.digest == recipe.digest
    assert begin(learning_rate=3.0000001e-4)[0].digest != recipe.digest
    assert begin(seed=1)[0].digest != recipe.digest
    assert begin(rope_theta=10001.0)[0].digest != recipe.digest
    assert replace(recipe, threads=2).digest != recipe.digest


def test_a_recipe_without_a_shuffle_buffer_has_the_bytes_it_had_before() -> None:
    plain, buffered = begin()[0], begin(shuffle_buffer_size=8, row_order="sequential")[0]
    assert b"shuffle_buffer_size" not in plain.to_bytes()
    assert b'"shuffle_buffer_size":8' in buffered.to_bytes()
    assert Recipe.from_bytes(plain.to_bytes()).shuffle_buffer_size == 0
    assert Recipe.from_bytes(buffered.to_bytes()) == buffered


def test_a_recipe_of_a_newer_version_is_refused() -> None:
    recipe, settings = begin()
    values = json.loads(recipe.to_bytes())
    with pytest.raises(InputError, match="newer version"):
        Recipe.from_bytes(json.dumps({**values, "format": 2}).encode())
    with pytest.raises(InputError, match="guard"):
        Recipe.from_bytes(json.dumps({**values, "guard": 1}).encode())
    with pytest.raises(InputError, match="tiers"):
        Settings.from_json({**settings.to_json(), "tiers": 2})


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("learning_rate", 0.0, "above 0"),
        ("learning_rate", float("nan"), "above 0"),
        ("learning_rate", float("inf"), "at most"),
        ("weight_decay", -0.1, "at least 0"),
        ("beta1", 1.0, "below 1"),
        ("beta2", -0.1, "below 1"),
        ("adam_eps", 0.0, "above 0"),
        ("max_grad_norm", 0.0, "above 0"),
        ("micro_batch_size", 0, "at least 1 and at most 1048576"),
        ("gradient_accumulation_steps", 0, "at least 1"),
        ("lm_head_chunk_tokens", 0, "at least 1"),
        ("num_layers", 10**9, "at most 16384"),
        ("vocab_size", 10**12, "at most"),
        ("hidden_size", 10**12, "at most"),
        ("intermediate_size", 10**30, "at most"),
        ("max_position_embeddings", 10**30, "at most"),
        ("warmup_tokens", -1, "at least 0"),
        ("min_lr_ratio", 1.5, "at most 1"),
        ("max_steps", -1, "at least 0"),
        ("max_validation_batches", 0, "at least 1"),
        ("max_pending_shard_writes", 0, "at least 1"),
        ("seed", -1, "at least 0"),
        ("grad_clip_mode", "norm", "global, shard, none"),
        ("lr_schedule", "steps", "constant, tokens"),
        ("lr_schedule", "cosine", "--decay-tokens"),
        ("prefetch_shards", "disk", "off, cpu"),
        ("max_position_embeddings", 15, "16 tokens"),
        ("hidden_size", 15, "hidden_size"),
        ("dropout", 0.1, "dropout"),
        ("num_kv_heads", 3, "num_kv_heads"),
    ],
)
def test_a_wrong_value_is_refused_by_name(flag: str, value: Any, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        begin(**{flag: value})
    assert caught.value.exit_code == 2
    assert flag in str(caught.value).replace("--", "").replace("-", "_")


def test_rows_of_more_tokens_than_any_step_has_are_refused() -> None:
    longest = ModelConfig(**SIZES, max_position_embeddings=2**20)
    with pytest.raises(InputError, match=r"--micro-batch-size 4096 .* at most 2048"):
        replace(begin()[0], model=longest, seq_len=2**20, micro_batch_size=4096)


def test_without_a_preset_every_size_is_asked_for_by_name() -> None:
    with pytest.raises(InputError, match=r"--preset demo.*--num-layers"):
        new_model({"vocab_size": 64})


def test_flags_change_a_presets_fields_and_its_derived_widths_follow() -> None:
    demo = new_model({"preset": "demo"})
    wider = new_model({"preset": "demo", "hidden_size": demo.hidden_size * 2})
    assert wider.head_dim == demo.head_dim * 2
    assert wider.num_layers == demo.num_layers
    assert wider.num_kv_heads == wider.num_heads
    fewer = new_model({"preset": "demo", "num_heads": 2})
    assert (fewer.num_heads, fewer.num_kv_heads) == (2, 2)


def test_token_ids_are_the_datas_unless_given() -> None:
    model = new_model({**SIZES, "bos_token_id": 5}, end_of_text_id=9)
    assert (model.bos_token_id, model.eos_token_id, model.pad_token_id) == (5, 9, 9)


def test_a_presets_training_is_a_default_that_flags_override() -> None:
    rate = PRESET_TRAINING["demo"]["learning_rate"]
    given = {"preset": "demo", "data_dir": "rows"}
    assert new_run(given, DATA, device="cpu", threads=1)[0].learning_rate == rate
    given["learning_rate"] = 1e-5  # type: ignore[assignment]
    assert new_run(given, DATA, device="cpu", threads=1)[0].learning_rate == 1e-5


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *[("hidden_size", 32), ("seed", 8), ("seq_len", 8), ("tied_embeddings", True)],
        *[("optimizer", "lion"), ("master_weight_dtype", "bf16")],
    ],
)
def test_what_is_fixed_may_not_change_on_resume(flag: str, value: Any) -> None:
    recipe, settings = begin(seed=7)
    with pytest.raises(InputError, match="--" + flag.replace("_", "-")):
        resumed_run(recipe, settings, {flag: value}, device=None)


def test_repeating_the_first_command_changes_nothing() -> None:
    given = {"data_dir": "rows", **SIZES, "seed": 7, "learning_rate": 1e-3, "max_steps": 5}
    recipe, settings = new_run(given, DATA, device="cpu", threads=1)
    again, settings_again = resumed_run(recipe, settings, given, device="cpu")
    assert changes(recipe, again) == {}
    assert changes(settings, settings_again) == {}


def test_changed_training_flags_are_applied_and_listed() -> None:
    recipe, settings = begin()
    new, new_settings = resumed_run(
        recipe, settings, {"learning_rate": 1e-5, "decay_tokens": 9, "max_steps": 20}, device=None
    )
    assert changes(recipe, new) == {"learning_rate": (3e-4, 1e-5), "decay_tokens": (0, 9)}
    assert changes(settings, new_settings) == {"max_steps": (None, 20)}


def test_what_the_engine_cannot_follow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, settings = begin(beta1=0.8)
    assert options_of(recipe, settings).beta1 == 0.8

    @dataclass(frozen=True, kw_only=True)
    class Fewer:
        """An engine that knows no beta1."""

        prefetch: str
        prefetch_window: int
        prefetch_optimizer_shards: bool
        timing_sync_cuda: bool
        activations: str
        activation_placement: str
        pinned_budget_bytes: int

    monkeypatch.setattr("trainer.recipe_options.EngineOptions", Fewer)
    with pytest.raises(InputError, match="--beta1 is not available"):
        options_of(recipe, settings)
    assert options_of(begin()[0], settings) == Fewer(
        prefetch="off",
        prefetch_window=1,
        prefetch_optimizer_shards=True,
        timing_sync_cuda=False,
        activations="recompute",
        activation_placement="vram",
        pinned_budget_bytes=machine_memory()[0] // 10 * 9,
    )


def test_every_field_of_a_recipe_is_the_engines_or_known_not_to_be() -> None:
    assert {f.name for f in fields(Recipe)} >= NOT_THE_ENGINES


def test_flags_whose_companion_is_off_are_noted() -> None:
    given = {"durable_every": 5, "prefetch_window": 3, "guard_replay_max_replays": 1}
    recipe, settings = begin(**given)
    notes = idle_notes(given, recipe, settings)
    assert [note.split(" ")[0] for note in notes] == [
        *("--durable-every", "--prefetch-window", "--guard-replay-max-replays"),
    ]
    given |= {"active": "here", "prefetch_shards": "cpu", "guarded_step_replay": True}
    assert idle_notes(given, *begin(**given)) == []


@pytest.mark.parametrize("flag", ["vram_budget", "pinned_budget"])
def test_what_is_no_size_is_refused_also_where_nothing_reads_it(flag: str) -> None:
    with pytest.raises(InputError, match=r"'8 apples': give a size"):
        check_given({flag: "8 apples"})
    assert check_given({flag: "8GiB"}) == []
    assert check_given({"vram_budget": "off"}) == []


@pytest.mark.parametrize(
    "given",
    [
        {"rope_scaling_factor": 8.0},
        {"rope_scaling_original_max_position_embeddings": 64},
        {"rope_scaling_type": "none", "rope_scaling_low_freq_factor": 1.0},
        {"rope_scaling_type": "linear"},
        {"rope_scaling_type": "llama3", "rope_scaling_original_max_position_embeddings": 64},
    ],
)
def test_half_a_rope_scaling_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="--rope-scaling-"):
        new_model({**SIZES, **given})


def test_a_whole_rope_scaling_is_taken() -> None:
    linear = new_model({**SIZES, "rope_scaling_type": "linear", "rope_scaling_factor": 4.0})
    assert linear.rope_scaling is not None
    assert linear.rope_scaling.factor == 4.0
    assert new_model({**SIZES, "rope_scaling_type": "none"}).rope_scaling is None


def test_scales_are_numbers_with_commas_between_them() -> None:
    recipe, _ = begin(guard_replay_lr_scales="1.0,0.5, .25")
    assert recipe.guard_replay_lr_scales == (1.0, 0.5, 0.25)
    assert Recipe.from_bytes(recipe.to_bytes()) == recipe
    for text in ("1.0;0.5", "", "1,,2", "0", "-1", "inf"):
        with pytest.raises(InputError, match="--guard-replay-lr-scales"):
            begin(guard_replay_lr_scales=text)


def test_folders_are_stored_whole_and_off_is_none() -> None:
    recipe, settings = begin(active="here", tensorboard="there", val_data_dir="seen")
    folders = (settings.active, settings.tensorboard, settings.val_data_dir)
    assert folders == tuple(map(os.path.abspath, ("here", "there", "seen")))
    off = dict.fromkeys(("active", "pinned_budget", "tensorboard", "val_data_dir"), "off")
    sized = replace(settings, pinned_budget="1GiB")
    _, settings = resumed_run(recipe, sized, off, device=None)
    assert all(getattr(settings, name) is None for name in off)
    assert check_given(off) == []


def test_flags_that_go_together_are_asked_for() -> None:
    with pytest.raises(InputError, match="--branch"):
        check_given({"from_ref": "step-3"})
    for count in (-1, 10**30):
        with pytest.raises(InputError, match="--skip-batches"):
            check_given({"skip_batches": count})
    with pytest.raises(InputError, match="--store run"):
        check_given({"run_dir": "run"})


def test_flags_without_effect_are_noted_and_those_switched_off_pass() -> None:
    notes = check_given({"max_resident_shards": 12, "clear_cuda_cache_between_shards": False})
    assert [note.split(" ")[0] for note in notes] == [
        "--max-resident-shards",
        "--clear-cuda-cache-between-shards",
    ]
    assert check_given({"guarded_step_replay": False, "global_optimizer_every": 0}) == []
    assert check_given({"shard_storage_format": "torch"}) != []
