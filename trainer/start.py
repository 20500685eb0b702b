"""From a command line to a run that steps: every check first, then the store, then the first step.

Owns the order of the beginning and the end of `train`. Knows nothing of how flags are parsed or how
a step is made. Invariants: nothing is created or allocated before all inputs and budgets are
checked; a run never starts empty where history exists.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import shardb
from shardb import Commit, Store
from shardb.errors import ConflictError
from trainer.budget import Budget, budget_of, check_memory, check_space
from trainer.device import Device
from trainer.engine import Engine, EngineOptions
from trainer.errors import InputError
from trainer.inputs import Inputs, end_of_text_id, open_inputs
from trainer.progress import Progress, progress_for
from trainer.recipe import Recipe, Settings
from trainer.recipe_build import (
    Changes,
    DataFacts,
    Given,
    changes,
    check_given,
    new_model,
    new_run,
    resumed_run,
)
from trainer.report import report_json, report_text
from trainer.run import Run, pin_snapshot
from trainer.run_shards import (
    BRANCH,
    Cursor,
    StoredRun,
    lines_since,
    read_stored_run,
    state_of,
    write_meta,
)
from trainer.signals import StopRequest
from trainer.step_log import last_logged_step, open_step_log

LOG_FOLDER = "logs"
# What a store that was being made when its process died may hold, besides an empty log.
FORMAT_FILE = "FORMAT"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run that is checked and may begin; `stored` is None when it begins at step 0."""

    store: Path
    recipe: Recipe
    settings: Settings
    inputs: Inputs
    budget: Budget
    stored: StoredRun | None
    notes: tuple[str, ...]

    @property
    def recipe_changes(self) -> Changes:
        """What differs from the stored recipe."""
        return changes(self.stored.recipe, self.recipe) if self.stored else {}


def train(given: Given, request: StopRequest, say: Callable[[str], None]) -> int:
    """Do what the flags say; give the exit code. `say` answers a question that trains nothing."""
    notes = check_given(given)
    path = Path(given["store"])
    allow_network = bool(given.get("allow_network"))
    stored = _look(path, allow_network)
    if stored is not None and not given.get("dry_run"):
        finished = _finished_text(stored, given)
        if finished is not None:
            say(finished)
            return 0
    plan = _plan_resumed(path, stored, given, notes) if stored else _plan_new(path, given, notes)
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


def _look(path: Path, allow_network: bool) -> StoredRun | None:
    """Read what the store holds; None when a run may begin there."""
    # Objects are written only after FORMAT was: without it they mean damage, which opening tells.
    if (path / FORMAT_FILE).exists() or _has_entries(path / "objects"):
        with shardb.open(path, allow_network=allow_network) as store:
            stored = read_stored_run(store)
            if stored is None:
                _refuse_lost_head(path, store)
        return stored
    logged_step = last_logged_step(path / LOG_FOLDER)
    if logged_step > 0:
        raise InputError(
            f"{path}: its step log goes to step {logged_step}, but the store is gone: put the store"
            " back, or remove the folder to begin anew"
        )
    if path.exists() and (not path.is_dir() or not _may_become_store(path)):
        raise InputError(f"{path}: exists and holds no store: give another --store")
    return None


def _refuse_lost_head(path: Path, store: Store) -> None:
    """Never start empty where history exists."""
    others = [name for name, rows in (("branches", store.branches()),) if rows]
    logged_step = last_logged_step(path / LOG_FOLDER)
    if others or store.commits() or logged_step:
        raise ConflictError(
            f"{path}: branch {BRANCH} has no commit, but the store has history"
            f" (step {logged_step} in its step log): see `shardb log {path}` and `shardb recover"
            f" {path}`, or give another --store"
        )


def _may_become_store(path: Path) -> bool:
    """Whether a folder is empty, or holds only what a store's making left when it died."""
    return not _has_entries(path) or (path / "wal").is_dir()


def _has_entries(folder: Path) -> bool:
    return folder.is_dir() and any(True for _ in os.scandir(folder))


def _finished_text(stored: StoredRun, given: Given) -> str | None:
    """Say so, before any data is opened, when a run has all its steps."""
    _, settings = resumed_run(stored.recipe, stored.settings, given, device=None)
    if settings.max_steps is None or stored.step < settings.max_steps:
        return None
    loss = stored.commit.metrics.get("loss")
    return (
        f"the run has {stored.step} steps already (--max-steps {settings.max_steps}"
        + (f", loss {loss:.4f}" if loss is not None else "")
        + "): nothing to do; raise --max-steps to go on"
    )


def _plan_new(path: Path, given: Given, notes: list[str]) -> Plan:
    data_dir = _need_data_dir(given.get("data_dir"))
    model = new_model(given, end_of_text_id(data_dir))
    device = Device.from_name(given.get("device", "auto")).name
    inputs = open_inputs(
        data_dir,
        given.get("val_data_dir"),
        vocab_size=model.vocab_size,
        seq_len=given.get("seq_len"),
    )
    facts = DataFacts(
        seq_len=inputs.rows.seq_len,
        digest=inputs.data_digest,
        end_of_text_id=end_of_text_id(data_dir),
    )
    threads = given.get("threads") or torch.get_num_threads()
    recipe, settings = new_run(given, facts, device=device, threads=threads)
    return Plan(
        store=path,
        recipe=recipe,
        settings=settings,
        inputs=inputs,
        budget=budget_of(recipe, settings),
        stored=None,
        notes=(*notes, *inputs.notes),
    )


def _plan_resumed(path: Path, stored: StoredRun, given: Given, notes: list[str]) -> Plan:
    device = Device.from_name(given["device"]).name if "device" in given else None
    recipe, settings = resumed_run(stored.recipe, stored.settings, given, device=device)
    inputs = open_inputs(
        settings.data_dir,
        settings.val_data_dir,
        vocab_size=recipe.model.vocab_size,
        seq_len=recipe.seq_len,
    )
    if inputs.data_digest != recipe.data_digest:
        if not given.get("accept_changed_data"):
            raise InputError(
                f"{settings.data_dir}: this is not the data that the run began on (digest"
                f" {inputs.data_digest}, then {recipe.data_digest}): give the same data, or"
                " --accept-changed-data to go on with this one"
            )
        recipe = replace(recipe, data_digest=inputs.data_digest)
    said = [
        f"changed: {name} from {old} to {new}"
        for one, other in ((stored.recipe, recipe), (stored.settings, settings))
        for name, (old, new) in changes(one, other).items()
    ]
    return Plan(
        store=path,
        recipe=recipe,
        settings=settings,
        inputs=inputs,
        budget=budget_of(recipe, settings),
        stored=stored,
        notes=(*notes, *inputs.notes, *said),
    )


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


def _need_data_dir(data_dir: str | None) -> str:
    if data_dir is None:
        raise InputError(
            "a new run needs --data-dir: the folder of token rows that `train-data prepare` made"
        )
    return data_dir
