"""The search at small scale: a tenth of the rows, met twice by the mixture of the long run.

Owns the recipes that are tried, the rounds in which they are, and the choice between them. A model
of a ninth of the parameters trains on a tenth of the rows, so that it overfits as the large one
would, or somewhat sooner. A round changes one setting at a time of the best recipe so far; then
every setting takes its best value, where that lowers held-out loss by more than MARGIN. Only the
half of the held-out text that chooses is measured. Knows nothing of the long run's own flags,
beyond how a recipe is carried over to it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tools.evidence_mixtures import MIXTURES, make_set
from tools.evidence_recipes import COMMON, ROW_TOKENS, Arm, Flags, Scale, scheduled
from tools.evidence_runs import Place, arms_at_once

PARTS = 10
# 11 M parameters: with a tenth of the rows as many a distinct token as 100 M have with all of them.
SMALL: Flags = {
    "preset": "perkunas-v2.9-100m",
    "hidden-size": 320,
    "num-layers": 5,
    "num-heads": 5,
    "intermediate-size": 800,
}
SEARCH_TOKENS = 20 << 20
WARMUP_SHARE = 0.05
VALIDATIONS = 16
CHOOSING_ROWS = 192
AT_ONCE = 5
# A smaller gain changes no setting. It is near what another seed makes: 0.007, tried once.
MARGIN = 0.005
ROUNDS = 4
# A round that has less is not begun.
ROUND_SECONDS = 45.0
SCHEDULES: Mapping[str, tuple[str, float]] = MappingProxyType(
    {
        "cosine to a tenth": ("cosine", 0.1),
        "cosine to 0": ("cosine", 0.0),
        "linear to 0": ("linear", 0.0),
    }
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the search may change; the rest of a run's flags is the same in all of them."""

    weight_decay: float = 0.25
    rate: float = 2.4e-3
    mixture: str = "steep"
    batch_rows: int = 32
    schedule: str = "cosine to a tenth"
    seed: int = 1
    share: float = 1.0

    def name(self) -> str:
        """Give the name of a run of it."""
        words = [
            f"decay{self.weight_decay:g}",
            f"rate{self.rate:g}",
            self.mixture,
            f"rows{self.batch_rows}",
            self.schedule.replace(" ", "-"),
            f"seed{self.seed}",
        ]
        return "-".join([*words, *([] if self.share == 1.0 else [f"share{self.share:g}"])])

    def differs_in(self, other: Recipe) -> list[str]:
        """Name the settings in which two recipes differ."""
        return [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]


Changes = Sequence[Mapping[str, Any]]
Losses = Mapping[Recipe, float]


def rounds(number: int, best: Recipe) -> Changes:
    """Give what a round changes, a setting at a time; the last one looks around what was found."""
    if number == 0:
        return [{"weight_decay": decay} for decay in (1.0, 3.0, 8.0)]
    if number == 1:
        mixtures = [{"mixture": name} for name in MIXTURES if name != best.mixture]
        return [*mixtures, *({"rate": best.rate * times} for times in (0.5, 2.0))]
    if number == 2:
        schedules = [{"schedule": name} for name in SCHEDULES if name != best.schedule]
        return [{"batch_rows": 16}, {"batch_rows": 64}, *schedules]
    decays = [best.weight_decay * times for times in (0.5, 2.0)]
    plain = Recipe().weight_decay
    found = [{"weight_decay": d} for d in decays] + [{"seed": 2}, {"share": 0.5}]
    return found if plain in (best.weight_decay, *decays) else [*found, {"weight_decay": plain}]


def small_arm(scale: Scale, recipe: Recipe) -> Arm:
    """Give the run of a recipe at small scale."""
    steps = round(recipe.share * SEARCH_TOKENS / (recipe.batch_rows * ROW_TOKENS))
    flags = {**SMALL, **recipe_flags(recipe, recipe.rate, steps)}
    return scale.arm(f"search-{recipe.name()}", flags, steps)


def recipe_flags(recipe: Recipe, rate: float, steps: int) -> Flags:
    """Give the flags of a recipe for a run of so many steps, its schedule ending with the last."""
    shape, floor = SCHEDULES[recipe.schedule]
    flags = {
        **COMMON,
        "seed": recipe.seed,
        "weight-decay": recipe.weight_decay,
        "lr-schedule": shape,
        "min-lr-ratio": floor,
        "micro-batch-size": recipe.batch_rows,
        "max-validation-batches": CHOOSING_ROWS // recipe.batch_rows,
        "validate-every": max(1, steps // VALIDATIONS),
        "durable-every": 0,
    }
    return scheduled(flags, rate, steps, max(1, round(WARMUP_SHARE * steps)))


def search(place: Place, scale: Scale, limit: float) -> None:
    """Make the rounds as far as time allows, and record what was chosen after each."""
    ends_at = time.monotonic() + limit
    best, losses = Recipe(), dict[Recipe, float]()
    for number in range(ROUNDS):
        left = ends_at - time.monotonic()
        if left < ROUND_SECONDS and not scale.is_tiny:
            place.record.write("skipped", run=f"round {number}", why="no time was left")
            return
        changes = rounds(number, best)[: 1 if scale.is_tiny else None]
        tried = [best, *(replace(best, **change) for change in changes)]
        began = time.monotonic()
        losses |= _losses([r for r in tried if r not in losses], place, scale, left)
        seconds = round(time.monotonic() - began, 1)
        best = chosen(best, {r: losses[r] for r in tried if r in losses})
        place.record.write("chosen", round=number, seconds=seconds, recipe=asdict(best))


def _losses(
    recipes: Sequence[Recipe], place: Place, scale: Scale, limit: float
) -> dict[Recipe, float]:
    """Run recipes at once; give the lowest held-out loss of each that made all of its steps."""
    arms = {recipe: small_arm(scale, recipe) for recipe in recipes}
    parts = PARTS * 40 if scale.is_tiny else PARTS
    pairs = []
    for recipe, arm in arms.items():
        place.record.write("tried", run=arm.name, steps=arm.steps, recipe=asdict(recipe))
        pairs.append((arm, replace(place, data=_set(place, recipe.mixture, parts))))
    lines = arms_at_once(pairs, limit, AT_ONCE)
    return {
        recipe: min(
            line["validation_loss"] for line in lines[arm.name] if "validation_loss" in line
        )
        for recipe, arm in arms.items()
        if lines[arm.name] and lines[arm.name][-1]["step"] == arm.steps
    }


def _set(place: Place, mixture: str, parts: int) -> Path:
    """Give the folder of a mixture's rows, made once."""
    folder = place.memory / f"set-{mixture}-{parts}"
    if not folder.exists():
        place.record.write("set", **make_set(place.data, folder, mixture, parts))
    return folder


def chosen(base: Recipe, losses: Losses) -> Recipe:
    """Give the recipe in which every setting has its best value of a round."""
    best = base
    for setting in [field.name for field in fields(base) if field.name not in ("seed", "share")]:
        alike = {r: loss for r, loss in losses.items() if r.differs_in(base) in ([], [setting])}
        if base not in alike:
            continue
        lowest = min(alike, key=lambda recipe: alike[recipe])
        if alike[lowest] < alike[base] - MARGIN:
            best = replace(best, **{setting: getattr(lowest, setting)})
    return best
