"""Every budget of a run by itself, before anything is allocated, and the one that binds.

Owns which budgets there are, what each has to hold against, and the flag that helps. Sizes come
from `budget`, device memory from `vram`, rates from `ceiling`. It says which budgets refuse a run:
a dry run tells all of them, a start raises the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from shardb.durations import duration
from shardb.errors import ShardbError
from trainer.budget import (
    ASKED,
    TENSORS,
    Budget,
    again_remedy,
    check_active_space,
    check_memory,
    check_space,
    is_ram_disk,
    room_bytes,
    step_shape,
)
from trainer.ceiling import DEVICE_COPY_BYTES, Ceiling, measure
from trainer.device import Device
from trainer.errors import InputError
from trainer.host_memory import machine_memory
from trainer.lora.base_tier import RAM, BaseTier, tier_text
from trainer.lora.forecast import bracket, step_operations
from trainer.lora.need import adapter_need
from trainer.model.adapter_settings import LoraSettings
from trainer.options import EngineOptions
from trainer.pipeline.choosing import vram_budget_of
from trainer.recipe import Recipe, Settings
from trainer.recipe_options import pinned_budget_bytes
from trainer.report import published_steps
from trainer.sizes import in_bytes
from trainer.step_memory import DeviceNeed, device_need
from trainer.vram import StepShape

# What a common consumer drive of 1 TB is warranted for.
DRIVE_BYTES_WRITTEN = 600 * 10**12
FIT_REMEDY = ", or let --fit choose"
VRAM_REMEDY = (
    "lower --micro-batch-size (and raise --gradient-accumulation-steps), --lm-head-chunk-tokens"
    + FIT_REMEDY
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetLine:
    """One budget: what is needed of what is there; None where there is no limit to hold against.

    more: what else there is to tell, by name.
    """

    name: str
    needed: float
    available: float | None
    text: str
    remedy: str
    more: Mapping[str, float] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Give the part of what is there that is needed; 0 without a limit."""
        return self.needed / self.available if self.available else 0.0

    def to_json(self) -> dict[str, Any]:
        """Give the line as a plain dictionary."""
        return {
            "name": self.name,
            "needed": self.needed,
            "available": self.available,
            "share": self.share,
            "text": self.text,
            "remedy": self.remedy,
        } | dict(self.more)


def preflight(
    recipe: Recipe,
    settings: Settings,
    budget: Budget,
    store: Path,
    *,
    seconds: float | None = None,
    measures: bool = False,
    tier: BaseTier | None = None,
) -> list[BudgetLine]:
    """Give every budget.

    seconds: of a step of this run, where one was made; measures: else take a tenth of a second to
    measure this machine; tier: where a frozen base waits, if there is one.
    """
    device = Device.from_name(recipe.device)
    shape = step_shape(recipe, settings, budget.activations, budget.placement)
    lines = [
        _vram(device, shape, recipe, settings),
        _boundaries(budget, device),
        _host_memory(budget),
        _page_locked(device, recipe, settings, budget, store, tier),
        *_frozen_base(tier),
        *_ram_disk(settings, budget),
        _disk_space(budget, store),
    ]
    # In the dtype that computes: products in another one are as fast as they are elsewhere.
    dtype = EngineOptions(dtype=recipe.dtype).torch_dtype
    rates = measure(dtype, device) if measures else None
    step_seconds = _step_time(recipe, budget, rates, seconds)
    lines += [step_seconds, *_speed(recipe, tier, rates, shape)]
    return [*lines, _disk_writes(settings, budget, store, step_seconds.needed)]


def binding(lines: Sequence[BudgetLine]) -> BudgetLine:
    """Give the budget of which most is used."""
    return max(lines, key=lambda line: line.share)


def refusals(
    lines: Sequence[BudgetLine], settings: Settings, budget: Budget, store: Path
) -> dict[str, ShardbError]:
    """Give the error of every budget that does not hold, by the budget's name."""
    checks: dict[str, Callable[[], object]] = {"device memory": partial(check_vram, lines)}
    if settings.active is not None:
        active = Path(settings.active)
        checks[_active_name(active)] = partial(check_active_space, budget, store, active)
    checks |= {
        "disk space": partial(check_space, budget, store),
        "host memory": partial(check_memory, budget),
    }
    found = {}
    for name, check in checks.items():
        try:
            check()
        except ShardbError as error:
            found[name] = error
    return found


def check_vram(lines: Sequence[BudgetLine]) -> None:
    """Refuse a step that does not fit into the device; InputError names the flags."""
    for line in lines:
        if line.name == "device memory" and line.share > 1:
            raise InputError(f"the step does not fit into the device: {line.text}; {line.remedy}")


def preflight_text(lines: Sequence[BudgetLine]) -> list[str]:
    """Give the budgets for people, the binding one named last with what would help."""
    tightest = binding(lines)
    text = ["budgets"]
    for line in lines:
        share = f"{100 * line.share:.3g} %" if line.available else ""
        text.append(f"  {line.name:<20}  {share:>7}  {line.text}")
    if tightest.share > 0:
        helps = f": {tightest.remedy}" if tightest.remedy and tightest.share > 0.5 else ""
        text.append(f"  {tightest.name} binds, {100 * tightest.share:.3g} % of it is needed{helps}")
    return text


def _vram(device: Device, shape: StepShape, recipe: Recipe, settings: Settings) -> BudgetLine:
    memory = device.memory_bytes()
    if memory is None:
        return _line("device memory", 0, None, "not used: the run computes on the CPU", "")
    limit = vram_budget_of(settings)
    line = vram_line(need_of(shape, recipe.lora, settings), memory[0], limit)
    if recipe.lora is not None:  # --fit is for whole weights
        line = replace(line, remedy=line.remedy.removesuffix(FIT_REMEDY))
    if line.share <= 1 or line.available is None or settings.activations not in ASKED:
        return line
    again = replace(shape, options=replace(shape.options, activations="recompute"))
    kept = line.needed - need_of(again, recipe.lora, settings).most_bytes
    return replace(line, remedy=again_remedy(kept, line.needed, line.available) + line.remedy)


def need_of(shape: StepShape, lora: LoraSettings | None, settings: Settings) -> DeviceNeed:
    """Give what a step takes of a CUDA device, by the way that it will go."""
    if lora is None:
        return device_need(shape, settings)
    return adapter_need(shape, lora, vram_budget_of(settings))


def vram_line(need: DeviceNeed, free: int, limit: int | None) -> BudgetLine:
    """Hold what is needed against what is free, and against the budget that was given."""
    text = f"{in_bytes(need.step_bytes)} predicted, fullest in {need.fullest}"
    if limit is not None and need.stages:
        text += (
            f"; --vram-budget {in_bytes(limit)} has room for {need.kept} of {need.stages} stages to"
            f" stay: at most {in_bytes(need.most_bytes)}"
        )
    text += f"; {in_bytes(free)} are free"
    if limit is not None and limit < free and need.stages:
        remedy = "raise --vram-budget, or " + VRAM_REMEDY
        return _line("device memory", need.most_bytes, limit, text, remedy)
    return _line("device memory", need.most_bytes, free, text, VRAM_REMEDY)


def _host_memory(budget: Budget) -> BudgetLine:
    total, available = machine_memory()
    text = (
        f"about {in_bytes(budget.memory_bytes)} of {in_bytes(total)};"
        f" {in_bytes(available)} are free"
    )
    if TENSORS in budget.memory:
        text += f"; the step's tensors take {in_bytes(budget.memory[TENSORS])}"
    remedy = "lower --micro-batch-size, --gradient-accumulation-steps or --lm-head-chunk-tokens"
    remedy = again_remedy(budget.kept_bytes, budget.memory_bytes, total) + remedy
    return _line("host memory", budget.memory_bytes, total, text, remedy)


def _boundaries(budget: Budget, device: Device) -> BudgetLine:
    """Tell where what waits for the backward pass will be, and why."""
    own = "host memory" if device.is_host else "device memory"
    places = {"vram": own, "host": "host memory", "spill": "a file in the store"}
    text = (
        f"{in_bytes(budget.boundary_bytes)} in {places[budget.placement]}: {budget.placement_why}"
    )
    return _line("boundary activations", budget.boundary_bytes, None, text, "")


def _page_locked(
    device: Device,
    recipe: Recipe,
    settings: Settings,
    budget: Budget,
    store: Path,
    tier: BaseTier | None,
) -> BudgetLine:
    """Hold what is copied to and from the device against what may be locked; no run fails by it."""
    if device.is_host:
        return _line("page-locked memory", 0, None, "none", "")
    limit = pinned_budget_bytes(settings)
    boundaries = budget.boundary_bytes if budget.placement == "host" else 0
    gradients = settings.gradient_placement == "host" or recipe.optimizer_device != "gpu"
    wanted = boundaries + (tier.base_bytes if tier is not None and tier.kind == RAM else 0)
    if is_ram_disk(store if settings.active is None else Path(settings.active)):
        wanted += budget.store_bytes if settings.active is None else budget.active_bytes
    wanted += budget.memory.get("gradients", 0) if gradients else 0
    text = f"{in_bytes(wanted)} of {in_bytes(limit)}"
    if wanted > limit:
        text += "; what is above it is copied from memory that is not locked, slower"
    # Once, before the first step, and given back.
    needed = min(max(wanted, DEVICE_COPY_BYTES), limit)
    remedy = again_remedy(budget.kept_bytes if boundaries else 0, wanted, limit)
    return _line("page-locked memory", needed, limit, text, remedy + "raise --pinned-budget")


def _frozen_base(tier: BaseTier | None) -> list[BudgetLine]:
    """Tell where a frozen base waits between visits, and why."""
    if tier is None:
        return []
    return [_line("frozen base", tier.base_bytes, None, tier_text(tier), "")]


def _speed(
    recipe: Recipe, tier: BaseTier | None, rates: Ceiling | None, shape: StepShape
) -> list[BudgetLine]:
    """Foretell the speed beside a frozen base, as a bracket."""
    if tier is None or rates is None or recipe.lora is None:
        return []
    found = bracket(recipe, recipe.lora, tier.base_bytes, rates, shape)
    beside = "" if tier.kind == RAM else "; reading the base from the disk is not in it"
    return [
        BudgetLine(
            name="speed",
            needed=found.most,
            available=None,
            text=found.text + beside,
            remedy="",
            more=found.to_json(),
        )
    ]


def _ram_disk(settings: Settings, budget: Budget) -> list[BudgetLine]:
    if settings.active is None:
        return []
    place = Path(settings.active)
    name, room = _active_name(place), room_bytes(place)
    text = f"{in_bytes(budget.active_bytes)} of {in_bytes(room)} for {place}"
    return [_line(name, budget.active_bytes, room, text, "lower --active-copies (2 is the least)")]


def _active_name(active: Path) -> str:
    return "RAM disk" if is_ram_disk(active) else "active store's disk"


def _disk_space(budget: Budget, store: Path) -> BudgetLine:
    room = room_bytes(store)
    needed = budget.store_bytes + budget.spill_bytes
    text = f"{in_bytes(needed)} of {in_bytes(room)} for {store}"
    if budget.spill_bytes:
        text += f", {in_bytes(budget.spill_bytes)} of it for activations"
    remedy = "raise --snapshot-every, or take another --store"
    return _line("disk space", needed, room, text, remedy)


def _step_time(
    recipe: Recipe, budget: Budget, rates: Ceiling | None, seconds: float | None
) -> BudgetLine:
    """Tell the last step's time, or the least that this machine could need."""
    if seconds is not None:
        text = f"{duration(seconds)}, as the last one took"
        return _line("time a step", seconds, None, text, "")
    if rates is None:
        return _line("time a step", 0, None, "not measured yet", "")
    least = max(
        step_operations(recipe, budget.activations) / rates.matmul_flops_per_second,
        budget.commit_bytes / rates.copy_bytes_per_second,
    )
    text = (
        f"at least {duration(least)} by this machine's arithmetic and copying; disks not measured"
    )
    return _line("time a step", least, None, text, "")


def _disk_writes(
    settings: Settings, budget: Budget, store: Path, step_seconds: float
) -> BudgetLine:
    """Tell bytes a step and of the run, and what they mean for a drive."""
    if is_ram_disk(store):
        return _line("disk writes", 0, None, "none: the store is on a RAM disk", "")
    stop = settings.max_steps
    steps = stop if stop is None or settings.active is None else published_steps(settings)
    a_step = budget.commit_bytes
    if settings.active is not None:
        a_step = int(a_step / settings.durable_every) if settings.durable_every else 0
    run = "" if steps is None else f", {in_bytes(budget.commit_bytes * steps)} in the run"
    worn = (
        ""
        if steps is None
        else f" ({100 * budget.commit_bytes * steps / DRIVE_BYTES_WRITTEN:.2g} % of"
        f" a drive of {in_bytes(DRIVE_BYTES_WRITTEN)} written)"
    )
    lasts = ""
    if a_step and step_seconds:
        lasting = DRIVE_BYTES_WRITTEN / a_step * step_seconds
        lasts = f"; at that speed without a pause such a drive lasts {duration(lasting)}"
    text = f"{in_bytes(a_step)} a step on average{run}{worn}{lasts}"
    total = budget.commit_bytes * (steps or 0)
    remedy = "train with --active on a RAM disk and raise --durable-every"
    return _line("disk writes", total, DRIVE_BYTES_WRITTEN, text, remedy)


def _line(name: str, needed: float, available: float | None, text: str, remedy: str) -> BudgetLine:
    return BudgetLine(name=name, needed=needed, available=available, text=text, remedy=remedy)
