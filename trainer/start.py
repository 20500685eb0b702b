"""From a command line to a run that steps: every check first, then the store, then the first step.

Owns the order of the beginning and the end of `train`. Knows nothing of how flags are parsed or how
a step is made. Invariants: nothing is created or allocated before all inputs and budgets are
checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

import shardb
from shardb import Commit, Store
from shardb.errors import ConflictError
from trainer.budget import check_memory, check_space
from trainer.device import Device
from trainer.engine import Engine, EngineOptions
from trainer.plan import LOG_FOLDER, Plan, finished_text, look, plan_new, plan_resumed
from trainer.progress import Progress, progress_for
from trainer.recipe import Recipe, Settings
from trainer.recipe_build import Given, check_given
from trainer.report import report_json, report_text
from trainer.run import Run, pin_snapshot
from trainer.run_shards import BRANCH, Cursor, lines_since, state_of, write_meta
from trainer.signals import StopRequest
from trainer.step_log import open_step_log


def train(given: Given, request: StopRequest, say: Callable[[str], None]) -> int:
    """Do what the flags say; give the exit code. `say` answers a question that trains nothing."""
    notes = check_given(given)
    path = Path(given["store"])
    allow_network = bool(given.get("allow_network"))
    stored = look(path, allow_network)
    if stored is not None and not given.get("dry_run"):
        finished = finished_text(stored, given)
        if finished is not None:
            say(finished)
            return 0
    plan = plan_resumed(path, stored, given, notes) if stored else plan_new(path, given, notes)
    if given.get("dry_run"):
        say(_report(plan, as_json=bool(given.get("json"))))
        return 0
    check_space(plan.budget, path)
    memory_warning = check_memory(plan.budget)
    progress = progress_for(
        plan.settings.max_steps, validates=plan.inputs.validation_rows is not None
    )
    request.before_abort = progress.close
    try:
        for note in (*plan.notes, *([f"warning: {memory_warning}"] if memory_warning else ())):
            progress.note(note)
        if request.stop_signal is not None:
            return request.exit_code
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        return _carry_out(plan, progress, request, allow_network=allow_network)
    finally:
        progress.close()


def engine_for(recipe: Recipe, settings: Settings, activations: str = "recompute") -> Engine:
    """Make the engine of a run; sets the number of torch's threads, on which sums depend."""
    torch.set_num_threads(recipe.threads)
    options = EngineOptions(
        dtype=recipe.dtype,
        optimizer=recipe.optimizer,
        grad_clip_mode=recipe.grad_clip_mode,
        max_grad_norm=recipe.max_grad_norm,
        lm_head_chunk_tokens=recipe.lm_head_chunk_tokens,
        beta1=recipe.beta1,
        beta2=recipe.beta2,
        adam_eps=recipe.adam_eps,
        weight_decay=recipe.weight_decay,
        weight_decay_scope=recipe.weight_decay_scope,
        prefetch=settings.prefetch_shards,
        activations=activations,
    )
    return Engine(recipe.model, options, Device.from_name(recipe.device))


def _carry_out(plan: Plan, progress: Progress, request: StopRequest, *, allow_network: bool) -> int:
    """Open the store, step until the end, and say how it ended."""
    engine = engine_for(plan.recipe, plan.settings, plan.budget.activations)
    background = plan.settings.async_shard_writes
    with shardb.open(
        plan.store,
        create=True,
        writer_threads=2 if background else 1,
        max_pending_writes=plan.settings.max_pending_shard_writes if background else 1,
        allow_network=allow_network,
    ) as store:
        head = _head(plan, store, engine)
        _say_start(plan, store, head, progress)
        step_log = open_step_log(
            plan.store / LOG_FOLDER, head.step, lambda last: lines_since(store, head, last)
        )
        pin_snapshot(store, head, plan.settings.snapshot_every, progress)
        run = Run(
            store=store,
            engine=engine,
            recipe=plan.recipe,
            settings=plan.settings,
            inputs=plan.inputs,
            head=head,
            unrecorded=plan.recipe_changes,
            progress=progress,
            step_log=step_log,
            request=request,
        )
        try:
            run.go_on()
        finally:
            step_log.close()
        return _say_end(plan, run.head, run.is_finished(), progress, request)


def _head(plan: Plan, store: Store, engine: Engine) -> Commit:
    """Take the branch; commit step 0 in an empty store, else check that it has not moved."""
    with store.begin(BRANCH) as txn:
        if txn.base is not None:
            if plan.stored is None or plan.stored.commit.id != txn.base.id:
                raise ConflictError(
                    f"{plan.store}: another process began or went on with this run just now:"
                    " start again to go on from there"
                )
            return txn.base
        engine.initialise(txn, plan.recipe.seed)
        write_meta(txn, plan.recipe, plan.inputs.tokenizer)
        return txn.commit(
            step=0,
            state=state_of(Cursor(), plan.recipe, plan.settings),
            metrics={},
            recipe_digest=plan.recipe.digest,
        )


def _say_start(plan: Plan, store: Store, head: Commit, progress: Progress) -> None:
    for part in (*store.recovery.dropped, *store.recovery.warnings):
        progress.note(f"warning: {part['what']}: {part['path']}: {part['why']}")
    how = "begins" if head.step == 0 else f"goes on after step {head.step}"
    stop = plan.settings.max_steps
    until = "until interrupted (each step is kept)" if stop is None else f"to step {stop:,}"
    progress.note(
        f"{plan.store}: {plan.budget.parameter_count:,} parameters in"
        f" {len(plan.budget.shards)} shards on {plan.recipe.device}; {how}, {until}"
    )


def _say_end(
    plan: Plan, head: Commit, is_finished: bool, progress: Progress, request: StopRequest
) -> int:
    progress.close()
    again = f"train --store {plan.store}"
    if request.stop_signal is not None:
        progress.note(
            f"{request.stop_signal.name}: step {head.step} is committed; go on with `{again}`"
        )
        return request.exit_code
    assert is_finished, "the loop ends at the stop or at a signal"
    progress.note(f"done: {head.step:,} steps; go on with `{again} --max-steps N`")
    return 0


def _report(plan: Plan, *, as_json: bool) -> str:
    parts = (plan.recipe, plan.settings, plan.budget)
    if as_json:
        return json.dumps(report_json(*parts) | {"notes": list(plan.notes)}, indent=2)
    return "\n".join([report_text(*parts), *plan.notes])
