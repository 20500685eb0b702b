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
from trainer.recipe import Recipe, Settings, flag_of
from trainer.recipe_flags import FLAGS, VALUES_NOT_YET, Scope, fields_of

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


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFacts:
    """What the training data decides of a recipe."""

    seq_len: int
    digest: str
    end_of_text_id: int | None


def check_given(given: Given) -> list[str]:
    """Refuse what is not built; give a note for each flag that has no effect here."""
    if "run_dir" in given:
        raise InputError(f"--run-dir is called --store here: give --store {given['run_dir']}")
    if given.get("json") and not given.get("dry_run"):
        raise InputError("--json goes with --dry-run: the step log of a run is JSON already")
    notes = []
    for flag in FLAGS:
        value = given.get(flag.field)
        if value is None:
            continue
        if flag.scope is Scope.NOT_YET and value:
            raise InputError(f"{flag_of(flag.field)} is not available yet: leave it out")
        if value in VALUES_NOT_YET.get(flag.field, ()):
            raise InputError(f"{flag_of(flag.field)} {value} is not available yet")
        if flag.field == "shard_storage_format" and value != "safetensors":
            raise InputError(
                f"--shard-storage-format {value}: shards are always safetensors; leave it out"
            )
        if flag.scope is Scope.NO_EFFECT:
            notes.append(f"{flag_of(flag.field)} has no effect here: {_first_lower(flag.help)}")
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
    return ModelConfig(**values)


def new_run(given: Given, data: DataFacts, *, device: str, threads: int) -> tuple[Recipe, Settings]:
    """Build recipe and settings of a run that begins."""
    defaults = PRESET_TRAINING.get(given.get("preset", ""), {})
    chosen = {**defaults, **given}
    training = {name: chosen[name] for name in fields_of(Scope.TRAINING) if name in chosen}
    recipe = Recipe(
        **training
        | {
            "model": new_model(given, data.end_of_text_id),
            "data_digest": data.digest,
            "seq_len": data.seq_len,
            "seed": given.get("seed", 0),
            "device": device,
            "threads": threads,
        }
    )
    return recipe, Settings(**_settings_given(chosen))


def resumed_run(
    recipe: Recipe, settings: Settings, given: Given, *, device: str | None
) -> tuple[Recipe, Settings]:
    """Apply flags to a stored run; InputError names each one that may not change."""
    _refuse_fixed_changes(recipe, settings, given)
    training = {name: given[name] for name in fields_of(Scope.TRAINING) if name in given}
    if device is not None:
        training["device"] = device
    return replace(recipe, **training), replace(settings, **_settings_given(given))


def changes(old: Recipe | Settings, new: Recipe | Settings) -> Changes:
    """List the fields that differ, each with its old and its new value."""
    pairs = {f.name: (getattr(old, f.name), getattr(new, f.name)) for f in fields(old)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _settings_given(given: Given) -> dict[str, Any]:
    names = {*fields_of(Scope.SETTING), "preset"}
    chosen = {name: given[name] for name in names if name in given}
    # A run is resumed from any working directory.
    for name in ("data_dir", "val_data_dir"):
        if chosen.get(name):
            chosen[name] = os.path.abspath(chosen[name])
    return chosen


def _refuse_missing_sizes(given: Given) -> None:
    missing = [flag_of(name) for name in _SIZES if name not in given]
    if missing:
        raise InputError(
            f"a new run needs a model: give --preset demo, or add {', '.join(missing)}"
        )


def _refuse_fixed_changes(recipe: Recipe, settings: Settings, given: Given) -> None:
    stored = {name: getattr(recipe.model, name) for name in fields_of(Scope.MODEL)}
    stored |= {"seed": recipe.seed, "seq_len": recipe.seq_len, "preset": settings.preset}
    for name, value in stored.items():
        if name in given and given[name] != value:
            raise InputError(
                f"{flag_of(name)} {given[name]} was given, but this run began with"
                f" {'none' if value is None else value}: leave the flag out, or begin"
                " another run in another --store"
            )


def _first_lower(text: str) -> str:
    return text[0].lower() + text[1:].rstrip(".")
