"""The flags of adapters: what they make of a recipe, and where they stand alone.

Owns how their values are read and the refusal of those that would do nothing. Knows nothing of
stores. Invariant: who forgot --lora-rank is told, and no weight is trained instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.errors import InputError
from trainer.recipe import LORA_FIELDS, flag_of

# `base_quant` is checked with the recipe: its default may be spelled out.
_OF_ADAPTERS = ("lora_alpha", "lora_targets", "lora_dropout")


def lora_given(given: Mapping[str, Any]) -> dict[str, Any]:
    """Give the fields of the recipe that these flags set."""
    chosen = {name: given[name] for name in LORA_FIELDS if name in given}
    if isinstance(chosen.get("lora_targets"), str):
        chosen["lora_targets"] = tuple(
            part.strip() for part in chosen["lora_targets"].split(",") if part.strip()
        )
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
