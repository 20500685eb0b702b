"""The flags of adapters: what they make of a recipe, and where they stand alone.

Owns how their values are read and the refusal of those that would do nothing. Knows nothing of
stores. Invariant: who forgot --lora-rank is told, and no weight is trained instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.errors import InputError
from trainer.lora.targets import meaning, named_once
from trainer.model.config import ModelConfig
from trainer.model.stages import build_trunk
from trainer.recipe import LORA_FIELDS, flag_of

# `base_quant` is checked with the recipe: its default may be spelled out.
_OF_ADAPTERS = ("lora_alpha", "lora_targets", "lora_dropout")


def lora_given(given: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Give the fields of the recipe that these flags set; each module is named once."""
    chosen = {name: given[name] for name in LORA_FIELDS if name in given}
    if isinstance(chosen.get("lora_targets"), str):
        names = [part.strip() for part in chosen["lora_targets"].split(",")]
        chosen["lora_targets"] = named_once(build_trunk(model), [each for each in names if each])
    if chosen.get("lora_rank"):  # compiled only where that is asked for
        chosen["compile_blocks"] = bool(given.get("compile_blocks"))
    return chosen


def refuse_lone(given: Mapping[str, Any], rank: int, remedy: str) -> None:
    """Refuse a flag of adapters where a run has none; `remedy` says how there would be some."""
    lone = [flag_of(name) for name in _OF_ADAPTERS if name in given]
    if lone and not rank:
        raise InputError(
            f"{lone[0]} is for adapters, and without --lora-rank all weights are trained: {remedy},"
            f" or leave {' and '.join(lone)} out"
        )


def means_the_same(model: ModelConfig, name: str, one: Any, other: Any) -> bool:
    """Say whether two values of a field are the same; targets are, where their modules are."""
    if name != "lora_targets" or one == other:
        return bool(one == other)
    trunk = build_trunk(model)
    return meaning(trunk, one) == meaning(trunk, other)


def refuse_uncompiled(given: Mapping[str, Any], model: ModelConfig) -> None:
    """Refuse to compile blocks where none would be: layers of transformers run as they are."""
    if given.get("compile_blocks") and model.hf_config:
        raise InputError(
            "--compile-blocks: this import's layers are those of transformers, and only native"
            " blocks are compiled: leave it out"
        )


def another_run(*, of_import: bool) -> str:
    """Say where a run with other settings may begin, to somebody whose run has its own."""
    if of_import:
        return "begin another run beside this one, from the import: --branch NAME --from imported"
    return "begin another run in another --store"


def as_typed(value: Any) -> str:
    """Give a value of a recipe as one would type it."""
    if value is None:
        return "none"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
