"""From a command line to a run that steps: every check first, then the stores, then the first step.

Owns the order of the beginning and the end of `train`. Knows nothing of how flags are parsed or how
a step is made. Invariants: nothing is created or allocated before all inputs and budgets are
checked; the last step is published before a run ends, unless publishing itself fails.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from shardb import Commit
from shardb.errors import CorruptionError, ShardbError
from shardb.recovery import told
from shardb.state import DEFAULT_BRANCH
from trainer.budget import check_memory, step_shape
from trainer.ceiling import Ceiling, ceiling_of
from trainer.device import Device
from trainer.engine import Engine
from trainer.errors import InputError
from trainer.finished import complete_step_log
from trainer.forecast_check import ForecastCheck
from trainer.found import find_run
from trainer.lora.base_tier import RAM, BaseTier
from trainer.lora.engine import AdapterEngine
from trainer.lora.forecast import bracket
from trainer.model.adapter_settings import LoraSettings
from trainer.opening import Surroundings, opened_tiers
from trainer.pipeline.choosing import pipeline_settings, pipeline_way, vram_budget_of
from trainer.plan import Plan, finished_text, make_plan, validates
from trainer.preflight import BudgetLine, binding, preflight, preflight_text, refusals
from trainer.progress import Progress, note_before, progress_for
from trainer.recipe import Recipe, Settings
from trainer.recipe_build import Given, check_given
from trainer.recipe_options import options_of
from trainer.report import report_json, report_text
from trainer.run import Run, RunLogs
from trainer.run_shards import lines_since
from trainer.scalar_writer import check_folder, open_scalars
from trainer.signals import StopRequest
from trainer.step_log import last_durable_step, log_folder, open_step_log
from trainer.tiers import Tiers
from trainer.tracing import RunTrace
from trainer.watchdog import Watchdog


def train(given: Given, request: StopRequest, say: Callable[[str], None]) -> int:
    """Do what the flags say; give the exit code. `say` answers a question that trains nothing."""
    notes = check_given(given)
    found = find_run(given)
    if found.newest is not None and not given.get("dry_run"):
        finished = finished_text(found.newest, given)
        if finished is not None and found.ahead is None:
            complete_step_log(
                Path(given["store"]),
                found.branch,
                found.newest.step,
                allow_network=bool(given.get("allow_network")),
            )
            say(finished)
            return 0
    plan = make_plan(found, given, notes, note=note_before)
    if given.get("trace"):
        _check_traced(plan, Path(given["trace"]))
    if plan.settings.tensorboard is not None:
        check_folder(plan.settings.tensorboard)
    if given.get("dry_run"):
        return _dry_run(plan, say, as_json=bool(given.get("json")))
    lines = _preflight(plan, measures=False)
    for refusal in _refusals(plan, lines).values():
        raise refusal
    memory_warning = check_memory(plan.budget)
    progress = progress_for(plan.settings.max_steps, validates=validates(plan))
    request.before_abort = progress.close
    try:
        progress.note(_binding_text(lines))
        for note in (*plan.notes, *([f"warning: {memory_warning}"] if memory_warning else ())):
            progress.note(note)
        if request.stop_signal is not None:
            return request.exit_code
        with Watchdog(progress.note) as watchdog:
            around = Surroundings(
                note=progress.note,
                watchdog=watchdog,
                allow_network=bool(given.get("allow_network")),
            )
            trace = Path(given["trace"]) if given.get("trace") else None
            return _carry_out(plan, around, progress, request, trace)
    finally:
        progress.close()


def engine_for(
    recipe: Recipe,
    settings: Settings,
    activations: str = "recompute",
    placement: str = "vram",
    spill_folder: str | None = None,
    keeps_base: bool = True,
    copies_base: bool = False,
) -> Engine:
    """Make the engine of a run; sets the number of torch's threads, on which sums depend."""
    torch.set_num_threads(recipe.threads)
    options = options_of(recipe, settings, activations, placement)
    device = Device.from_name(recipe.device)
    if recipe.lora is not None:
        return AdapterEngine(
            recipe.model,
            options,
            device,
            recipe.lora,
            seed=recipe.seed,
            spill_folder=spill_folder,
            poison=settings.poison_buffers,
            keeps_base=keeps_base,
            copies_base=copies_base,
            vram_budget_bytes=vram_budget_of(settings),
        )
    engine = Engine(recipe.model, options, device, spill_folder=spill_folder)
    chosen = pipeline_settings(settings, options, device)
    if chosen is not None:
        engine.use_pipeline(chosen)
    return engine


@contextmanager
def opened_run(
    plan: Plan,
    around: Surroundings,
    progress: Progress,
    request: StopRequest,
    *,
    ceiling: Ceiling | None = None,
) -> Iterator[Run]:
    """Open all that a run needs to step; `ceiling` is measured when none is given."""
    engine = engine_for(
        plan.recipe,
        plan.settings,
        plan.budget.activations,
        plan.budget.placement,
        spill_folder=str(plan.store / "spare"),
        keeps_base=plan.base_tier is None or plan.base_tier.kind == RAM,
        copies_base=plan.budget.copies_base,
    )
    with opened_tiers(plan, engine, around) as tiers, closing(engine):
        head = tiers.training.branches()[tiers.branch]
        _say_start(plan, tiers, head, progress)
        with _open_logs(plan, tiers, head) as logs:
            dtype, device = engine.options.torch_dtype, engine.device
            ceiling = ceiling or ceiling_of(plan.recipe, dtype, device, logs.folder)
            if plan.recipe.lora is not None and plan.base_tier is not None:
                progress.note(_speed_text(plan, plan.recipe.lora, plan.base_tier, ceiling))
            yield Run(
                plan=plan,
                tiers=tiers,
                engine=engine,
                ceiling=ceiling,
                head=head,
                cursor=plan.cursor,
                unrecorded=plan.recipe_changes,
                progress=progress,
                logs=logs,
                watchdog=around.watchdog,
                request=request,
                forecast=ForecastCheck(plan.tuned, logs.folder) if plan.tuned else None,
            )


def _speed_text(plan: Plan, lora: LoraSettings, tier: BaseTier, ceiling: Ceiling) -> str:
    budget = plan.budget
    shape = step_shape(plan.recipe, plan.settings, budget.activations, budget.placement)
    return bracket(plan.recipe, lora, tier.base_bytes, ceiling, shape).text


def _check_traced(plan: Plan, path: Path) -> None:
    """Refuse a trace of steps that have no lanes, or to where there is no folder."""
    if not path.absolute().parent.is_dir():
        raise InputError(f"--trace {path}: there is no such folder: make it, or give another file")
    budget = plan.budget
    options = options_of(plan.recipe, plan.settings, budget.activations, budget.placement)
    is_host = Device.from_name(plan.recipe.device).is_host
    way = pipeline_way(plan.settings, options, is_host=is_host)
    if way is None or plan.recipe.lora is not None:
        raise InputError(
            "--trace: the steps of this run do not go through the device pipeline, so they have no"
            " lanes: give --device-pipeline on (on a GPU it is chosen where it can do the step)"
        )


def _carry_out(
    plan: Plan,
    around: Surroundings,
    progress: Progress,
    request: StopRequest,
    trace: Path | None,
) -> int:
    """Open the stores, step until the end, and say how it ended."""
    with opened_run(plan, around, progress, request) as run, ExitStack() as stack:
        if trace is not None and run.engine.pipeline is not None:
            run.trace = RunTrace(trace, run.engine.pipeline.lanes)
            stack.callback(run.trace.close)
        try:
            run.go_on()
        except Exception:
            _rescue(run, progress)
            raise
        run.tiers.finish(run.head)
    return _say_end(plan, run)


@contextmanager
def _open_logs(plan: Plan, tiers: Tiers, head: Commit) -> Iterator[RunLogs]:
    """Open the step log, its gaps filled from the commits, and the event file if one is wanted."""
    folder, durable_step = log_folder(plan.store, tiers.branch), tiers.durable_step
    step_log = open_step_log(
        folder,
        head.step,
        lambda last: lines_since(tiers.training, head, last, durable_step=durable_step),
    )
    try:
        events = plan.settings.tensorboard
        scalars = None if events is None else open_scalars(events, head.step)
        try:
            yield RunLogs(folder=folder, step_log=step_log, scalars=scalars)
        finally:
            if scalars is not None:
                scalars.close()
    finally:
        step_log.close()


def _rescue(run: Run, progress: Progress) -> None:
    """After an error, publish what is committed; say so where even that fails."""
    try:
        run.tiers.finish(run.head)
    except ShardbError as error:
        root = run.tiers.training.root
        then = "it is published when the run goes on"
        if isinstance(error, CorruptionError):
            then = (
                f"if `shardb repair {root}` cannot mend it, move that folder away: the run goes on"
                f" after step {run.tiers.durable_step}, which is in {run.tiers.durable.root}"
            )
        progress.note(f"step {run.head.step} is only in {root} ({error.message}): {then}")


def _say_start(plan: Plan, tiers: Tiers, head: Commit, progress: Progress) -> None:
    report = tiers.durable.recovery
    for line in told([*report.dropped, *report.warnings]):
        progress.note(f"warning: {line}")
    if (lost := _lost_text(plan, tiers)) is not None:
        progress.note(f"warning: {lost}")
    how = "begins" if head.step == 0 else f"goes on after step {head.step}"
    stop = plan.settings.max_steps
    until = "until interrupted (each step is kept)" if stop is None else f"to step {stop:,}"
    where = "" if tiers.training is tiers.durable else f", trained in {tiers.training.root}"
    branch = "" if tiers.branch == DEFAULT_BRANCH else f" branch {tiers.branch},"
    progress.note(
        f"{plan.store}:{branch} {plan.budget.parameter_count:,} {_what(plan.recipe)} in"
        f" {len(plan.budget.shards)} shards on {plan.recipe.device}{where}; {how}, {until}"
    )


def _lost_text(plan: Plan, tiers: Tiers) -> str | None:
    """Say that durable steps are gone which nobody rewound: a log cut off to the byte looks whole.

    The step log tells them until it is opened, and loses them then.
    """
    logged_step = last_durable_step(log_folder(plan.store, tiers.branch))
    step = tiers.durable.branches()[tiers.branch].step
    if logged_step <= step or _was_rewound(tiers):
        return None
    return (
        f"{plan.store}: step {logged_step} was durable once, says logs/steps.jsonl, and the store's"
        f" newest is {step}: the end of wal/ is lost, or an older copy was put back. Objects that"
        " the lost steps wrote stay until `shardb gc`: if there is a newer copy of wal/, stop now"
    )


def _was_rewound(tiers: Tiers) -> bool:
    """Whether the log, as far as it is there in raw form, tells of steps that were left."""
    return any(
        record["kind"] == "rewind" and record["branch"] == tiers.branch
        for record in tiers.durable.history()
    )


def _what(recipe: Recipe) -> str:
    return "parameters" if recipe.lora is None else "parameters of adapters"


def _say_end(plan: Plan, run: Run) -> int:
    progress, request, head = run.progress, run.request, run.head
    progress.close()
    again = f"train --store {shlex.quote(str(plan.store))}"
    if run.tiers.branch != DEFAULT_BRANCH:
        again += f" --branch {run.tiers.branch}"
    if request.stop_signal is not None:
        progress.note(
            f"{request.stop_signal.name}: step {head.step} is committed; go on with `{again}`"
        )
        return request.exit_code
    assert run.is_finished(), "the loop ends at the stop or at a signal"
    progress.note(f"done: {head.step:,} steps; go on with `{again} --max-steps N`")
    return 0


def _dry_run(plan: Plan, say: Callable[[str], None], *, as_json: bool) -> int:
    """Tell everything, then fail as the run itself would where a budget does not hold."""
    lines = _preflight(plan, measures=True)
    refused = _refusals(plan, lines)
    say(_report(plan, lines, refused, as_json=as_json))
    for refusal in refused.values():
        raise refusal
    return 0


def _report(
    plan: Plan, lines: list[BudgetLine], refused: Mapping[str, ShardbError], *, as_json: bool
) -> str:
    parts = (plan.recipe, plan.settings, plan.budget)
    if as_json:
        told: dict[str, Any] = {
            "budgets": [line.to_json() for line in lines],
            "binding": binding(lines).name,
            "refused": {name: error.message for name, error in refused.items()},
            "notes": list(plan.notes),
        }
        if plan.tuned is not None:
            told["fit"] = plan.tuned.to_json()
        return json.dumps(report_json(*parts) | told, indent=2)
    broken = [f"  does not hold: {', '.join(refused)}"] if refused else []
    return "\n".join([report_text(*parts), *preflight_text(lines), *broken, *plan.notes])


def _refusals(plan: Plan, lines: list[BudgetLine]) -> dict[str, ShardbError]:
    return refusals(lines, plan.settings, plan.budget, plan.store)


def _binding_text(lines: list[BudgetLine]) -> str:
    tightest = binding(lines)
    return f"budgets hold; {tightest.name} binds: {tightest.text}"


def _preflight(plan: Plan, *, measures: bool) -> list[BudgetLine]:
    stored = plan.found.newest
    return preflight(
        plan.recipe,
        plan.settings,
        plan.budget,
        plan.store,
        seconds=stored.commit.metrics.get("seconds") if stored else None,
        measures=measures,
        tier=plan.base_tier,
    )
