"""What `--fit` chooses by measured rates: the forecast that is fastest among what fits.

Owns the choice, and what is left alone because it was asked for. Memory is `trainer.fit`'s and the
predictor's; times are `trainer.forecast`'s. Knows nothing of devices. Invariant: rows a step, and
so the batch that a step learns from, stay what they were; nothing is chosen that the predictor puts
above the budget.

Gradients that are recomputed cost a second pass in a step that is clipped, and such that wait on
the host cost the link in every step; how many steps are clipped is not known before a run, so
CLIPPED_SHARE is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from trainer.budget import shard_bytes, step_shape
from trainer.errors import InputError
from trainer.fit import FULL_TOKENS, Fitted, fit
from trainer.forecast import (
    Forecast,
    Load,
    compute_seconds,
    forecast,
    publish_seconds,
    read_seconds,
)
from trainer.model.stages import parameter_count
from trainer.placement_choice import run_boundary_bytes
from trainer.rates import Rates
from trainer.recipe import Recipe, Settings
from trainer.sizes import in_bytes
from trainer.vram import StepShape

CLIPPED_SHARE = 0.1
# A publication may keep the disk busy for so much of the time between two.
DISK_SHARE = 0.5
INTERVALS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
# A forecast is no better than this: what is preferred by order stays unless another gains more.
WORTH = 1.02
READ_SHARE, WINDOW_MAX = 0.05, 4
GRADIENT_PLACES = ("vram", "host", "recompute")


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What is chosen for: a run's recipe and settings, and the fields that were given by flags.

    budget_bytes: of the memory where steps compute; is_host: that this is host memory.
    """

    recipe: Recipe
    settings: Settings
    given: frozenset[str]
    budget_bytes: int
    pipelined: bool
    is_host: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What a step takes of that memory, and the part of the parameters that stays in it."""

    bytes: int
    kept_share: float = 0.0


Predictor = Callable[[StepShape, Settings], Need]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """What was chosen."""

    recipe: Recipe
    settings: Settings
    fitted: Fitted
    forecast: Forecast
    rates: Rates

    @property
    def text(self) -> str:
        """Say what was chosen, by the flags that would choose the same."""
        settings = self.settings
        said = self.fitted.text
        if self.forecast.pipelined:
            said += f" --gradient-placement {settings.gradient_placement}"
        else:
            said += f" --prefetch-shards {settings.prefetch_shards}"
            if settings.prefetch_shards != "off":
                said += f" --prefetch-window {settings.prefetch_window}"
        if settings.active is not None:
            said += f" --durable-every {settings.durable_every}"
        where = "host memory" if self.recipe.device == "cpu" else "device memory"
        return f"{said}: {in_bytes(self.fitted.bytes)} of {where} predicted"

    @property
    def notes(self) -> tuple[str, ...]:
        """Say what was measured, chosen and forecast."""
        measured = "; ".join(self.rates.lines)
        return (
            f"--fit measured in {self.rates.seconds:.1f} s: {measured}",
            self.text,
            self.forecast.text,
        )

    def to_json(self) -> dict[str, Any]:
        """Give all of it as a plain dictionary."""
        return {"rates": self.rates.to_json(), "forecast": self.forecast.to_json()}


def tune(asked: Asked, rates: Rates, need: Predictor) -> Tuned:
    """Choose; InputError with the least that is needed where nothing fits."""
    best: Tuned | None = None
    score = math.inf
    refused: InputError | None = None
    for settings in _ways(asked):
        try:
            found = list(_sizes(asked, settings, need))
        except InputError as error:
            refused = refused or error
            continue
        for fitted in found:
            tuned = _tuned(asked, settings, fitted, rates, need)
            seconds = _expected_seconds(tuned, asked, rates)
            if best is None or seconds * WORTH < score:
                best, score = tuned, seconds
    if best is None:
        assert refused is not None, "there is always a way to try"
        raise refused
    return best


def _ways(asked: Asked) -> Iterator[Settings]:
    """Give settings for every place of activations and gradients, the preferred first."""
    settings, given = asked.settings, asked.given
    places = ["vram"] if asked.is_host else ["vram", "host"]
    if settings.activation_placement != "auto":
        places = [settings.activation_placement]
    kinds = ["recompute"] if asked.pipelined else ["keep", "recompute"]
    if settings.activations != "auto" and "activations" in given:
        kinds = [settings.activations]
    waits = asked.pipelined and asked.recipe.grad_clip_mode == "global"
    gradients = GRADIENT_PLACES if waits and not asked.is_host else (settings.gradient_placement,)
    if "gradient_placement" in given:
        gradients = (settings.gradient_placement,)
    for kind in kinds:
        for place in places:
            if kind == "keep" and place != "vram":
                continue
            for gradient in gradients:
                yield replace(
                    settings,
                    activations=kind,
                    activation_placement=place,
                    gradient_placement=gradient,
                )


def _sizes(asked: Asked, settings: Settings, need: Predictor) -> Iterator[Fitted]:
    """Give the largest micro-batch that fits, and two smaller ones, which leave room for stages."""
    recipe = asked.recipe
    shape = step_shape(recipe, settings, settings.activations, settings.activation_placement)

    def predict(candidate: StepShape) -> int:
        return need(candidate, settings).bytes

    largest = fit(
        shape,
        asked.budget_bytes,
        settings.activation_placement,
        predict=predict,
        ways=[(settings.activations, settings.activation_placement)],
    )
    yield largest
    if not asked.pipelined or settings.vram_budget is None:
        return
    size = largest.shape.micro_batch_size
    for part in (2, 4):
        if size % part == 0 and size // part * shape.seq_len >= FULL_TOKENS:
            smaller = replace(
                largest.shape,
                micro_batch_size=size // part,
                accumulation=largest.shape.accumulation * part,
            )
            yield Fitted(shape=smaller, bytes=predict(smaller))


def _tuned(
    asked: Asked, settings: Settings, fitted: Fitted, rates: Rates, need: Predictor
) -> Tuned:
    """Complete a candidate: what follows from its time alone, and its forecast."""
    recipe = replace(
        asked.recipe,
        micro_batch_size=fitted.shape.micro_batch_size,
        gradient_accumulation_steps=fitted.shape.accumulation,
        lm_head_chunk_tokens=fitted.shape.options.lm_head_chunk_tokens,
    )
    load = load_of(recipe, settings, asked, need(fitted.shape, settings).kept_share)
    settings = _reading_ahead(load, rates, asked)
    load = replace(load, settings=settings)
    settings = _publishing(load, rates, asked)
    load = replace(load, settings=settings)
    return Tuned(
        recipe=recipe,
        settings=settings,
        fitted=fitted,
        forecast=forecast(load, rates),
        rates=rates,
    )


def load_of(recipe: Recipe, settings: Settings, asked: Asked, kept_share: float) -> Load:
    """Give what a step does."""
    forms = step_shape(recipe, settings, settings.activations, settings.activation_placement)
    sizes, on_host = shard_bytes(recipe.model, forms.options), forms.options.updates_on_host
    params = {n.removeprefix("params/"): s for n, s in sizes.items() if n.startswith("params/")}
    return Load(
        recipe=recipe,
        settings=settings,
        activations=settings.activations,
        placement=settings.activation_placement,
        stored_bytes=sum(sizes.values()),
        shards=len(sizes),
        parameters=parameter_count(recipe.model),
        boundary_bytes=run_boundary_bytes(recipe),
        kept_share=kept_share,
        host_share=sum(size for name, size in params.items() if on_host(name))
        / sum(params.values()),
        pipelined=asked.pipelined,
    )


def _expected_seconds(tuned: Tuned, asked: Asked, rates: Rates) -> float:
    """Give the mean time of a step, some of them clipped."""
    seconds = tuned.forecast.seconds
    waits = asked.pipelined and asked.recipe.grad_clip_mode == "global"
    if not waits:
        return seconds
    load = load_of(tuned.recipe, tuned.settings, asked, 0.0)
    again = 0.0
    if tuned.settings.gradient_placement == "recompute":
        again = compute_seconds(load, rates)
    elif tuned.settings.gradient_placement == "host" and rates.link is not None:
        again = 4 * load.parameters / rates.link.into
    return seconds + CLIPPED_SHARE * again


def _reading_ahead(load: Load, rates: Rates, asked: Asked) -> Settings:
    """Choose how many shards are read ahead: none where reading is nothing beside computing."""
    settings = load.settings
    if "prefetch_shards" in asked.given or load.pipelined:
        return settings
    reading, computing = read_seconds(load, rates), compute_seconds(load, rates)
    if reading <= READ_SHARE * computing:
        return replace(settings, prefetch_shards="off")
    window = min(WINDOW_MAX, math.ceil(reading / computing))
    if "prefetch_window" in asked.given:
        window = settings.prefetch_window
    return replace(settings, prefetch_shards="cpu", prefetch_window=window)


def _publishing(load: Load, rates: Rates, asked: Asked) -> Settings:
    """Choose the least interval that leaves the disk half of its time."""
    settings = load.settings
    if settings.active is None or "durable_every" in asked.given:
        return settings
    step = forecast(replace(load, settings=replace(settings, durable_every=0)), rates).seconds
    least = publish_seconds(load, rates) / (DISK_SHARE * step)
    every = next((n for n in INTERVALS if n >= least), INTERVALS[-1])
    return replace(settings, durable_every=every)
