"""What a run will be: its recipe, settings, data and budgets, checked before anything is made.

Owns the two beginnings, of a new run and of one that goes on, and what refuses them. Knows nothing
of screens, and writes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trainer.autotune import Tuned
from trainer.budget import Budget, budget_of
from trainer.device import Device
from trainer.errors import InputError
from trainer.fitting import tuned_here
from trainer.found import Found
from trainer.inputs import Inputs, check_beside_import, end_of_text_id, open_inputs
from trainer.lora.base_tier import BaseTier, base_tier, tier_text
from trainer.lora.budget import adapter_budget
from trainer.lora.engine import check_options
from trainer.model.stages import check_keeps_apart
from trainer.model.stored import SOURCE_SHARD
from trainer.placement_choice import placed
from trainer.prefetch import prefetch_of
from trainer.recipe import Recipe, Settings
from trainer.recipe_build import (
    Changes,
    DataFacts,
    Given,
    changes,
    idle_notes,
    new_model,
    new_run,
    refuse_other_model,
    resumed_run,
    settings_given,
)
from trainer.recipe_options import options_of
from trainer.run_shards import Cursor, StoredRun
from trainer.update_place import updates_placed


def _unsaid(_text: str) -> None:
    """Nobody waits for it."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run that is checked and may begin, or go on from `found.newest`.

    `cursor` is where its next step begins in the data; `tuned` what `--fit` chose and forecasts.
    """

    store: Path
    found: Found
    recipe: Recipe
    settings: Settings
    inputs: Inputs
    budget: Budget
    cursor: Cursor
    notes: tuple[str, ...]
    base_tier: BaseTier | None = None
    tuned: Tuned | None = None

    @property
    def recipe_changes(self) -> Changes:
        """What differs from the stored recipe, and from where the data would have gone on."""
        stored = self.found.newest
        if stored is None:
            return {}
        at = Cursor.of(stored.commit)
        moved = {} if at == self.cursor else {"position": (at.position, self.cursor.position)}
        return changes(stored.recipe, self.recipe) | moved


def make_plan(
    found: Found, given: Given, notes: list[str], *, note: Callable[[str], None] = _unsaid
) -> Plan:
    """Plan what the flags ask for; InputError names the flag or file that is wrong.

    `note` is told of what takes some seconds.
    """
    path = Path(given["store"])
    if found.newest is None:
        plan = _plan_new(path, found, given, notes)
    else:
        plan = _plan_resumed(path, found, found.newest, given, notes)
    if given.get("fit") and plan.recipe.lora is not None:
        raise InputError("--fit is for training whole weights: give --micro-batch-size instead")
    plan = _with_updates_placed(plan, note)
    if given.get("fit"):
        plan = _fitted(plan, given, note)
    _check_together(plan)
    if plan.recipe.lora is not None:
        tier = base_tier(plan.recipe, plan.recipe.lora, plan.settings, plan.store)
        plan = replace(plan, base_tier=tier, notes=(*plan.notes, tier_text(tier)))
    skipped_rows = given.get("skip_batches", 0) * plan.recipe.rows_per_step
    said = [*plan.notes, *idle_notes(given, plan.recipe, plan.settings), *_row_notes(plan)]
    if skipped_rows and found.newest is not None and _has_skipped(found, given):
        said.append("--skip-batches was applied when this branch began, and is not again")
        skipped_rows = 0
    if skipped_rows:
        said.append(f"skipping {skipped_rows:,} rows: {given['skip_batches']} steps' worth")
    return replace(plan, cursor=plan.cursor.past(skipped_rows), notes=tuple(said))


def finished_text(stored: StoredRun, given: Given) -> str | None:
    """Say so, before any data is opened, when a run has all its steps."""
    _, settings = resumed_run(
        stored.recipe, stored.settings, given, device=None, of_import=_is_of_import(stored)
    )
    if settings.max_steps is None or stored.step < settings.max_steps:
        return None
    loss = stored.commit.metrics.get("loss")
    return (
        f"the run has {stored.step} steps already (--max-steps {settings.max_steps}"
        + (f", loss {loss:.4f}" if loss is not None else "")
        + "): nothing to do; raise --max-steps to go on"
    )


def _plan_new(path: Path, found: Found, given: Given, notes: list[str]) -> Plan:
    data_dir = _need_data_dir(given.get("data_dir"))
    imported = found.imported
    if imported is None:
        if given.get("lora_rank"):
            raise InputError(
                "--lora-rank trains beside a model that was imported, and this store holds none:"
                " begin with `import-hf PACKAGE --store STORE`"
            )
        model = new_model(given, end_of_text_id(data_dir))
    else:
        refuse_other_model(given, imported.model)
        model = imported.model
    device = Device.from_name(given.get("device", "auto")).name
    inputs = open_inputs(
        data_dir,
        settings_given(given).get("val_data_dir"),
        vocab_size=model.vocab_size,
        seq_len=given.get("seq_len"),
        data_dtype=given.get("data_dtype", "npy"),
        warns_of_vocabulary=imported is None,
    )
    if imported is not None:
        accepts = bool(given.get("accept_other_tokenizer"))
        beside = check_beside_import(inputs, model, imported.tokenizer, accepts_other=accepts)
        notes = [*notes, *beside]
    facts = DataFacts(
        seq_len=inputs.rows.seq_len,
        digest=inputs.data_digest,
        end_of_text_id=end_of_text_id(data_dir),
        records_apart=inputs.rows.is_apart,
    )
    threads = given.get("threads") or torch.get_num_threads()
    recipe, settings = new_run(given, facts, device=device, threads=threads, model=model)
    return Plan(
        store=path,
        found=found,
        recipe=recipe,
        settings=settings,
        inputs=inputs,
        budget=_budget(recipe, settings, path, found),
        cursor=Cursor(),
        notes=(*notes, *inputs.notes),
    )


def _plan_resumed(
    path: Path, found: Found, stored: StoredRun, given: Given, notes: list[str]
) -> Plan:
    device = Device.from_name(given["device"]).name if "device" in given else None
    of_import = _is_of_import(stored)
    recipe, settings = resumed_run(
        stored.recipe, stored.settings, given, device=device, of_import=of_import
    )
    inputs = open_inputs(
        settings.data_dir,
        settings.val_data_dir,
        vocab_size=recipe.model.vocab_size,
        seq_len=recipe.seq_len,
        data_dtype=settings.data_dtype,
        warns_of_vocabulary=not of_import,
    )
    if inputs.data_digest != recipe.data_digest:
        if not given.get("accept_changed_data"):
            raise InputError(
                f"{settings.data_dir}: this is not the data that the run began on (digest"
                f" {inputs.data_digest}, then {recipe.data_digest}): give the same data, or"
                " --accept-changed-data to go on with this one"
            )
        apart = inputs.rows.is_apart
        recipe = replace(recipe, data_digest=inputs.data_digest, records_apart=apart)
    said = [
        f"changed: {name} from {old} to {new}"
        for one, other in ((stored.recipe, recipe), (stored.settings, settings))
        for name, (old, new) in changes(one, other).items()
    ]
    return Plan(
        store=path,
        found=found,
        recipe=recipe,
        settings=settings,
        inputs=inputs,
        budget=_budget(recipe, settings, path, found),
        cursor=Cursor.of(stored.commit),
        notes=(*notes, *inputs.notes, *said),
    )


def _fitted(plan: Plan, given: Given, note: Callable[[str], None]) -> Plan:
    """Let `--fit` choose; a change on resume is recorded like any other."""
    tuned = tuned_here(plan.recipe, plan.settings, plan.store, given, note)
    return replace(
        plan,
        recipe=tuned.recipe,
        settings=tuned.settings,
        budget=_budget(tuned.recipe, tuned.settings, plan.store, plan.found),
        notes=(*plan.notes, *tuned.notes),
        tuned=tuned,
    )


def _with_updates_placed(plan: Plan, note: Callable[[str], None]) -> Plan:
    """Make one place, or a list of stages, of what `--optimizer-device` says."""
    stored = plan.found.newest.recipe if plan.found.newest else None
    recipe, said = updates_placed(plan.recipe, plan.settings, stored, note)
    if recipe == plan.recipe:
        return plan
    budget = _budget(recipe, plan.settings, plan.store, plan.found)
    return replace(plan, recipe=recipe, budget=budget, notes=(*plan.notes, *said))


def _budget(recipe: Recipe, settings: Settings, store: Path, found: Found) -> Budget:
    copies = found.kept_commits + 1  # and the step in work
    if recipe.lora is not None:
        base = found.base.shards if found.base else {}
        stored = {name: entry.bytes for name, entry in base.items()}
        given = (recipe, recipe.lora, settings, store)
        return adapter_budget(*given, copies=copies, stored=stored)
    return placed(budget_of(recipe, settings, store, copies=copies), recipe, settings, store)


def _check_together(plan: Plan) -> None:
    """Refuse what each flag allows by itself and all of them together do not."""
    recipe, settings = plan.recipe, plan.settings
    options = options_of(recipe, settings, plan.budget.activations, plan.budget.placement)
    prefetch_of(options, Device.from_name(recipe.device))
    if recipe.lora is not None:
        check_options(options, recipe.lora)
    if recipe.records_apart:
        check_keeps_apart(recipe.model)
    if settings.snapshot_best and not validates(plan):
        raise InputError(
            "--snapshot-best needs losses to compare: give --val-data-dir, and --validate-every"
            " above 0, or --no-snapshot-best"
        )
    rows = plan.inputs.validation_rows
    if settings.validation_whole_batches and rows and rows.row_count < recipe.micro_batch_size:
        raise InputError(
            f"--validation-whole-batches: {settings.val_data_dir} holds {rows.row_count} rows, not"
            f" one whole batch of {recipe.micro_batch_size} (--micro-batch-size)"
        )
    if settings.active is not None:
        _check_active_place(plan.store, Path(settings.active))


def _row_notes(plan: Plan) -> list[str]:
    """Warn where a step has more rows than there are, so that it learns some of them twice."""
    rows, recipe = plan.inputs.rows, plan.recipe
    if recipe.rows_per_step <= rows.row_count:
        return []
    warning = (
        f"warning: a step takes {recipe.rows_per_step:,} rows and {rows.directory} holds"
        f" {rows.row_count:,}: some are in it more than once; lower --micro-batch-size or"
        " --gradient-accumulation-steps"
    )
    return [warning]


def validates(plan: Plan) -> bool:
    """Say whether the run measures a validation loss."""
    return plan.inputs.validation_rows is not None and plan.settings.validate_every > 0


def _check_active_place(store: Path, active: Path) -> None:
    nearest = next(place for place in (active, *active.parents) if os.path.lexists(place))
    if not nearest.is_dir():
        raise InputError(f"--active {active}: {nearest} is no folder: give another place")
    one, other = store.resolve(), active.resolve()
    if one == other or one in other.parents or other in one.parents:
        raise InputError(
            f"--active {active}: it must be another folder than --store {store}, and neither inside"
            " the other"
        )


def _has_skipped(found: Found, given: Given) -> bool:
    """Whether a call that begins a branch is made again, after the branch got its first step."""
    return "from_ref" in given and not found.begins_branch and _has_own_step(found)


def _has_own_step(found: Found) -> bool:
    assert found.newest is not None, "only a branch that exists has steps"
    return found.newest.commit.branch == found.branch


def _is_of_import(stored: StoredRun) -> bool:
    return SOURCE_SHARD in stored.commit.shards


def _need_data_dir(data_dir: str | None) -> str:
    if data_dir is None:
        raise InputError(
            "a new run needs --data-dir: the folder of token rows that `train-data prepare` made"
        )
    return data_dir
