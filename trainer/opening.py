"""Opening the stores of a run, with its first or newest commit where it is to be trained.

Owns the order: durable store, its branch and first commit, the active store, what it lacks. Knows
nothing of steps. Invariant: the commit that a plan was made for is the one that is trained on, or
nothing is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import shardb
from shardb import Store, branching
from shardb.errors import ConflictError
from shardb.transfer import copy_commit
from trainer.active import Publishing, TwoTiers
from trainer.active_hint import write_hint
from trainer.active_left import gone_text, left_text
from trainer.active_relation import open_active
from trainer.budget import is_ram_disk
from trainer.engine import Engine
from trainer.plan import Plan
from trainer.recipe import Settings
from trainer.run_shards import state_of, write_meta
from trainer.tiers import OneTier, Tiers
from trainer.watchdog import Watchdog
from trainer.writer_threads import WRITER_THREADS, writer_threads

# Images kept in memory; a durable store behind an active one is written to and hardly read.
CACHE_BYTES = 1 << 30
DURABLE_CACHE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What the stores of a run have around them."""

    note: Callable[[str], None]
    watchdog: Watchdog
    allow_network: bool


@contextmanager
def opened_tiers(plan: Plan, engine: Engine, around: Surroundings) -> Iterator[Tiers]:
    """Open the stores that a plan names; the branch has its newest commit in `training`."""
    settings, branch = plan.settings, plan.found.branch
    _say_gone(plan, around)
    plan.store.absolute().parent.mkdir(parents=True, exist_ok=True)
    if settings.active is None:
        tier = plan.base_tier
        cache_bytes = CACHE_BYTES if tier is None else tier.cache_bytes
        in_memory = is_ram_disk(plan.store)
        threads = writer_threads(engine.device) if in_memory else WRITER_THREADS
        with _opened(
            plan.store, settings, around, cache_bytes=cache_bytes, threads=threads
        ) as store:
            _bring_branch(plan, store, engine, around)
            _check_unmoved(plan, store)
            _say_left(plan, store, around)
            write_hint(plan.store, branch, None)
            yield OneTier(store, branch, around.note)
        return
    active_path = Path(settings.active)
    active_path.parent.mkdir(parents=True, exist_ok=True)
    with (
        _opened(plan.store, settings, around, cache_bytes=DURABLE_CACHE_BYTES) as durable,
        _opened(active_path, settings, around, threads=writer_threads(engine.device)) as active,
    ):
        _bring_branch(plan, durable, engine, around)
        tiers = TwoTiers(
            active,
            durable,
            branch,
            publishing=Publishing(every=settings.durable_every, copies=settings.active_copies),
            watchdog=around.watchdog,
            note=around.note,
        )
        try:
            tiers.seed()
            _check_unmoved(plan, active)
            _say_left(plan, durable, around)
            write_hint(plan.store, branch, settings.active)
            yield tiers
        finally:
            tiers.close()


@contextmanager
def _opened(
    path: Path,
    settings: Settings,
    around: Surroundings,
    *,
    cache_bytes: int = CACHE_BYTES,
    threads: int = WRITER_THREADS,
) -> Iterator[Store]:
    background = settings.async_shard_writes
    # Each thread works on one shard that counts as pending.
    pending = max(settings.max_pending_shard_writes, 2 * (threads - WRITER_THREADS))
    with shardb.open(
        path,
        create=True,
        cache_bytes=cache_bytes,
        writer_threads=threads if background else 0,
        max_pending_writes=pending if background else 1,
        allow_network=around.allow_network,
    ) as store:
        yield store


def _bring_branch(plan: Plan, store: Store, engine: Engine, around: Surroundings) -> None:
    """Take the branch of the durable store: begin it where it is new, and the run where it is."""
    found = plan.found
    if found.begins_branch:
        assert found.base is not None, "a branch begins at a commit"
        branching.create_branch(store, found.branch, found.base.id)
    with store.begin(found.branch) as txn:
        expected = found.base.id if found.base else None
        if (txn.base.id if txn.base else None) != expected:
            raise _moved(plan.store)
        if txn.base is None:
            engine.initialise(txn, plan.recipe.seed)
            write_meta(txn, plan.recipe, plan.inputs.tokenizer)
            txn.commit(
                step=0,
                state=state_of(plan.cursor, plan.recipe, plan.settings),
                metrics={},
                recipe_digest=plan.recipe.digest,
            )
    if found.ahead is not None and str(found.ahead) != plan.settings.active:
        _bring_from_elsewhere(plan, store, found.ahead)
        around.note(
            f"{found.ahead}: its steps up to {store.branches()[found.branch].step} were brought to"
            f" {plan.store}"
        )


def _say_gone(plan: Plan, around: Surroundings) -> None:
    durable = plan.found.durable
    text = None if durable is None else gone_text(plan.store, plan.found.branch, durable.step)
    if text is not None:
        around.note(f"warning: {text}")


def _say_left(plan: Plan, store: Store, around: Surroundings) -> None:
    found = plan.found
    text = left_text(plan.store, found.branch, plan.settings.active, store.branches())
    if text is not None:
        around.note(text)


def _bring_from_elsewhere(plan: Plan, store: Store, active_path: Path) -> None:
    """Publish what an active store has that this run is not trained in any more."""
    newest = plan.found.newest
    assert newest is not None, "a store that is ahead has a head"
    with open_active(active_path, newest.step) as active:
        copy_commit(active, store, newest.commit.id, plan.found.branch)


def _check_unmoved(plan: Plan, training: Store) -> None:
    newest = plan.found.newest
    if newest is not None and training.branches()[plan.found.branch].id != newest.commit.id:
        raise _moved(plan.store)


def _moved(store: Path) -> ConflictError:
    return ConflictError(
        f"{store}: another process began or went on with this run just now: start again to go on"
        " from there"
    )
