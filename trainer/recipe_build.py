"""From flags to a recipe: a new run's from presets and defaults, a resumed run's from its own.

Owns the precedence (flag, preset, default), what may change on resume, and the list of changes.
Knows nothing of stores and parses no command line. `given` maps a flag's field to its value and
holds only what the user typed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from trainer.errors import InputError
from trainer.model.config import ModelConfig
from trainer.model.presets import preset
from trainer.recipe import LORA_FIELDS, Recipe, Settings, flag_of
from trainer.recipe_adapters import (
    another_run,
    as_typed,
    lora_given,
    means_the_same,
    refuse_lone,
    refuse_uncompiled,
)
from trainer.recipe_flags import FLAGS, Scope, fields_of
from trainer.sizes import size_of

Given = Mapping[str, Any]
Changes = dict[str, tuple[Any, Any]]

# What a preset's user most likely wants where no flag says otherwise.
PRESET_TRAINING: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "demo": {
            "micro_batch_size": 16,
            "learning_rate": 2e-3,
            "warmup_tokens": 40_960,
            "validate_every": 20,
            "max_validation_batches": 8,
        },
    }
)
_SIZES = ("vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size")
_TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
_SCALES = ("guard_replay_lr_scales", "guard_replay_grad_norm_scales")
# A run is resumed from any working directory, so these are stored whole.
_FOLDERS = ("data_dir", "val_data_dir", "active", "tensorboard")
# What a run may do without again, although it remembers one.
_SWITCHED_OFF = ("active", "pinned_budget", "tensorboard", "val_data_dir", "vram_budget")
_OFF_WORDS = ("off", "")
_BYTE_SIZES = ("vram_budget", "pinned_budget")
# So many steps' rows, of the most that a step has, are still counted in 63 bits.
SKIP_BATCHES_MAX = 2**22
# What decides the form of shards that exist.
_FORMS = ("optimizer", "optimizer_state_dtype", "master_weight_dtype")
# What a flag needs to have any effect: another field, which is off where it is in the second place.
_NEEDS: Mapping[str, tuple[str, Any]] = MappingProxyType(
    {
        "active_copies": ("active", None),
        "durable_every": ("active", None),
        "prefetch_window": ("prefetch_shards", "off"),
        "prefetch_optimizer_shards": ("prefetch_shards", "off"),
        "max_pending_shard_writes": ("async_shard_writes", False),
        "row_order": ("shuffle_train", False),
        **dict.fromkeys(("poison_buffers", "base_tier", "disk_kind"), ("lora_rank", 0)),
        **{
            f"global_optimizer_{name}": ("global_optimizer_every", 0)
            for name in ("blend", "min_scale", "max_scale")
        },
        **{
            f"guard_replay_{name}": ("guarded_step_replay", False)
            for name in (
                "max_replays",
                "loss_tolerance",
                "loss_tolerance_ratio",
                "lr_scales",
                "grad_norm_scales",
                "on_exhaust",
            )
        },
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFacts:
    """What the training data decides of a recipe."""

    seq_len: int
    digest: str
    end_of_text_id: int | None
    records_apart: bool = False


def check_given(given: Given) -> list[str]:
    """Refuse what contradicts itself; give a note for each flag that has no effect here."""
    if "run_dir" in given:
        raise InputError(f"--run-dir is called --store here: give --store {given['run_dir']}")
    if given.get("json") and not given.get("dry_run"):
        raise InputError("--json goes with --dry-run: the step log of a run is JSON already")
    if "from_ref" in given and "branch" not in given:
        raise InputError("--from goes with --branch: the name of the branch that begins there")
    if not 0 <= given.get("skip_batches", 0) <= SKIP_BATCHES_MAX:
        raise InputError(
            f"--skip-batches is {given['skip_batches']}: it must be at least 0 and at most"
            f" {SKIP_BATCHES_MAX}"
        )
    _check_sizes(given)
    return [
        f"{flag_of(flag.field)} has no effect here: {_first_lower(flag.help)}"
        for flag in FLAGS
        if flag.scope is Scope.NO_EFFECT and given.get(flag.field) is not None
    ]


def _check_sizes(given: Given) -> None:
    """Refuse what is no size, also where nothing reads it today: it is stored with the run."""
    for name in _BYTE_SIZES:
        text = given.get(name)
        if text is not None and not (name in _SWITCHED_OFF and text in _OFF_WORDS):
            size_of(text, flag_of(name))


def idle_notes(given: Given, recipe: Recipe, settings: Settings) -> list[str]:
    """Give a note for each flag whose companion is off, so that it does nothing."""
    values = {
        f.name: getattr(record, f.name) for record in (recipe, settings) for f in fields(record)
    }
    notes = [
        f"{flag_of(name)} has no effect without {flag_of(needed)}"
        for name, (needed, off) in _NEEDS.items()
        if name in given and values[needed] == off
    ]
    if "shuffle_buffer_size" in given and not recipe.shuffle_train:
        notes.append("--shuffle-buffer-size has no effect without --shuffle-train")
    elif "shuffle_buffer_size" in given and recipe.row_order != "sequential":
        notes.append(
            "--shuffle-buffer-size has no effect without --row-order sequential: rows in shuffled"
            " order are mixed further already"
        )
    if "vram_budget" in given and not given.get("fit") and recipe.device == "cpu":
        notes.append("--vram-budget has no effect on the CPU without --fit")
    return notes


def new_model(given: Given, end_of_text_id: int | None = None) -> ModelConfig:
    """Build the model of a new run from its preset and flags."""
    values: dict[str, Any] = {}
    if "preset" in given:
        named = preset(given["preset"])
        values = named.to_json()
        # The preset's derived widths belong to its own sizes: another size derives them again.
        if {"hidden_size", "num_heads"} & set(given):
            values["head_dim"] = 0
            if named.num_kv_heads == named.num_heads:
                values["num_kv_heads"] = 0
    else:
        _refuse_missing_sizes(given)
    vocab_size = given.get("vocab_size", values.get("vocab_size"))
    if end_of_text_id is not None and end_of_text_id < vocab_size:
        values |= dict.fromkeys(_TOKEN_IDS, end_of_text_id)
    values |= {name: given[name] for name in fields_of(Scope.MODEL) if name in given}
    config = ModelConfig(**values)
    _check_rope_scaling(given, config)
    return config


def _check_rope_scaling(given: Given, config: ModelConfig) -> None:
    """Refuse half a scaling: the model is fixed for ever, so a note would come too late."""
    kind, numbers = config.rope_scaling_type, fields_of(Scope.MODEL) - {"rope_scaling_type"}
    lone = sorted(name for name in numbers if name.startswith("rope_scaling_") and name in given)
    if kind == "none" and lone:
        raise InputError(
            f"{flag_of(lone[0])} scales nothing without --rope-scaling-type: give linear or llama3"
        )
    if kind != "none" and config.rope_scaling_factor == 1 and "rope_scaling_factor" not in given:
        raise InputError(
            f"--rope-scaling-type {kind} needs --rope-scaling-factor: how much longer sequences get"
        )


def refuse_other_model(given: Given, model: ModelConfig) -> None:
    """Refuse a flag that would change an imported model."""
    if "preset" in given:
        raise InputError(
            "--preset names a new model, but this store holds an imported one: leave it out"
        )
    for name in sorted(fields_of(Scope.MODEL) & given.keys()):
        value = getattr(model, name)
        if given[name] != value:
            raise InputError(
                f"{flag_of(name)} {given[name]} was given, but the imported model has {value}:"
                " leave the flag out"
            )


def new_run(
    given: Given, data: DataFacts, *, device: str, threads: int, model: ModelConfig | None = None
) -> tuple[Recipe, Settings]:
    """Build recipe and settings of a run that begins, with an imported `model` or a new one."""
    refuse_lone(given, given.get("lora_rank", 0), "give --lora-rank too")
    defaults = PRESET_TRAINING.get(given.get("preset", ""), {})
    chosen = {**defaults, **given}
    training = _training_given(chosen)
    model = model or new_model(given, data.end_of_text_id)
    refuse_uncompiled(given, model)
    recipe = Recipe(
        **training
        | {
            "model": model,
            "data_digest": data.digest,
            "records_apart": data.records_apart,
            "seq_len": data.seq_len,
            "seed": given.get("seed", 0),
            "device": device,
            "threads": threads,
            "compile_blocks": given.get("compile_blocks", device.startswith("cuda")),
            **lora_given(given, model),
        }
    )
    return recipe, Settings(**settings_given(chosen))


def resumed_run(
    recipe: Recipe,
    settings: Settings,
    given: Given,
    *,
    device: str | None,
    of_import: bool = False,
) -> tuple[Recipe, Settings]:
    """Apply flags to a stored run; InputError names each one that may not change.

    of_import: the run began with an imported model, so another may begin beside it.
    """
    _refuse_fixed_changes(recipe, settings, given, another_run(of_import=of_import))
    if not recipe.compile_blocks:
        refuse_uncompiled(given, recipe.model)
    training = _training_given(given)
    if device is not None:
        training["device"] = device
    return replace(recipe, **training), replace(settings, **settings_given(given))


def changes(old: Recipe | Settings, new: Recipe | Settings) -> Changes:
    """List the fields that differ, each with its old and its new value."""
    pairs = {f.name: (getattr(old, f.name), getattr(new, f.name)) for f in fields(old)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def settings_given(given: Given) -> dict[str, Any]:
    """Give the settings that flags set, as `Settings` takes them."""
    names = {*fields_of(Scope.SETTING), "preset"}
    chosen = {name: given[name] for name in names if name in given}
    for name in _SWITCHED_OFF:
        if chosen.get(name) in _OFF_WORDS:
            chosen[name] = None
    for name in _FOLDERS:
        if chosen.get(name):
            chosen[name] = os.path.abspath(chosen[name])
    return chosen


def _training_given(given: Given) -> dict[str, Any]:
    chosen = {name: given[name] for name in fields_of(Scope.TRAINING) if name in given}
    for name in _SCALES:
        if isinstance(chosen.get(name), str):
            chosen[name] = _numbers(name, chosen[name])
    return chosen


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"{flag_of(name)} is {text!r}: give numbers with commas between them, as in 1.0,0.5"
        ) from None


def _refuse_missing_sizes(given: Given) -> None:
    missing = [flag_of(name) for name in _SIZES if name not in given]
    if missing:
        raise InputError(
            f"a new run needs a model: give --preset demo, or add {', '.join(missing)}"
        )


def _refuse_fixed_changes(recipe: Recipe, settings: Settings, given: Given, elsewhere: str) -> None:
    """Refuse what would change what is fixed; `elsewhere` says how to begin a run with it."""
    refuse_lone(given, recipe.lora_rank or given.get("lora_rank", 0), elsewhere)
    stored = {name: getattr(recipe.model, name) for name in fields_of(Scope.MODEL)}
    stored |= {"seed": recipe.seed, "seq_len": recipe.seq_len, "preset": settings.preset}
    # These decide what the stored shards hold.
    stored |= {name: getattr(recipe, name) for name in ("lora_rank", *_FORMS, *sorted(LORA_FIELDS))}
    given = {**given, **lora_given(given, recipe.model)}
    for name, value in stored.items():
        if name in given and not means_the_same(recipe.model, name, given[name], value):
            raise InputError(
                f"{flag_of(name)} {as_typed(given[name])} was given, but this run began with"
                f" {as_typed(value)}: leave the flag out, or {elsewhere}"
            )


def _first_lower(text: str) -> str:
    return text[0].lower() + text[1:].rstrip(".")
