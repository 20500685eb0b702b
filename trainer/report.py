"""What `train --dry-run` prints: the model, every shard, the budgets.

Owns the wording and the JSON. Knows nothing of how the numbers came about.
"""

from __future__ import annotations

import math
from typing import Any

from trainer.budget import Budget
from trainer.model.config import ModelConfig
from trainer.recipe import Recipe, Settings
from trainer.sizes import in_bytes


def report_json(recipe: Recipe, settings: Settings, budget: Budget) -> dict[str, Any]:
    """Give the report as a plain dictionary."""
    return {
        "model": recipe.model.to_json(),
        "parameter_count": budget.parameter_count,
        "shards": dict(budget.shards),
        "seq_len": recipe.seq_len,
        "rows_per_step": recipe.rows_per_step,
        "tokens_per_step": recipe.rows_per_step * recipe.seq_len,
        "max_steps": settings.max_steps,
        "recipe_digest": recipe.digest,
        "data_digest": recipe.data_digest,
        "budget": {
            "store_bytes": budget.store_bytes,
            "active_bytes": budget.active_bytes,
            "bytes_written_per_step": budget.commit_bytes,
            "bytes_written": _written(budget, settings),
            "memory_bytes_estimate": budget.memory_bytes,
            "memory": dict(budget.memory),
            "activations": budget.activations,
            "activations_why": budget.activations_why,
        },
    }


def report_text(recipe: Recipe, settings: Settings, budget: Budget) -> str:
    """Give the report for people."""
    width = max(len(name) for name in budget.shards)
    snapshots = f", {budget.snapshots:,} snapshots" if budget.snapshots else ""
    written = _written(budget, settings)
    in_all = "" if written is None else f", {in_bytes(written)} in {settings.max_steps:,} steps"
    lines = [
        f"model       {settings.preset or 'from flags'}: {_model_text(recipe.model)}",
        f"parameters  {budget.parameter_count:,}",
        f"a step      {_step_text(recipe)}",
        f"shards      {len(budget.shards)}, {in_bytes(budget.commit_bytes)} together",
        *(f"  {name:<{width}}  {size:>15,} bytes" for name, size in budget.shards.items()),
        f"store       {in_bytes(budget.store_bytes)} at most: {budget.copies} copies{snapshots}",
        *_active_lines(settings, budget),
        f"written     {in_bytes(budget.commit_bytes)} {_each(settings)}{in_all}",
        f"memory      about {in_bytes(budget.memory_bytes)}; {_kept_text(budget)}",
        *(f"  {part:<32}  {in_bytes(size):>12}" for part, size in budget.memory.items()),
    ]
    return "\n".join(lines)


def _kept_text(budget: Budget) -> str:
    why = f" ({budget.activations_why})" if budget.activations_why else ""
    return _ACTIVATIONS[budget.activations] + why


_ACTIVATIONS = {
    "keep": "activations are kept for the backward pass",
    "attention": "what attention gave is kept for the backward pass, the rest computed again",
    "recompute": "activations are computed again in the backward pass",
}


def _active_lines(settings: Settings, budget: Budget) -> list[str]:
    if settings.active is None:
        return []
    published = f"one step in {settings.durable_every:,}, " if settings.durable_every else ""
    copies = f"{budget.active_copies} copies in {settings.active}"
    kinds = f"{published}snapshots, bests and the last step are published"
    return [f"active      {in_bytes(budget.active_bytes)} at most: {copies}; {kinds}"]


def _each(settings: Settings) -> str:
    return "a step" if settings.active is None else "a published step"


def _model_text(model: ModelConfig) -> str:
    return (
        f"{model.num_layers} layers, hidden {model.hidden_size}, {model.num_heads} heads"
        f" ({model.num_kv_heads} for keys and values), inner {model.intermediate_size},"
        f" vocabulary {model.vocab_size:,}, head {'tied' if model.tied_embeddings else 'untied'}"
    )


def _step_text(recipe: Recipe) -> str:
    return (
        f"{recipe.micro_batch_size} rows × {recipe.gradient_accumulation_steps} micro-batches"
        f" × {recipe.seq_len} tokens = {recipe.rows_per_step * recipe.seq_len:,} tokens"
    )


def _written(budget: Budget, settings: Settings) -> int | None:
    """Bytes that a run writes to its durable store; bests come on top."""
    stop = settings.max_steps
    if stop is None:
        return None
    return budget.commit_bytes * (stop if settings.active is None else published_steps(settings))


def published_steps(settings: Settings) -> int:
    """Count the steps of a run that its settings publish for certain."""
    stop, every, snapshots = settings.max_steps, settings.durable_every, settings.snapshot_every
    assert stop is not None, "a run without a stop publishes without end"
    if not stop:
        return 0
    both = math.lcm(every, snapshots)
    count = sum(stop // n for n in (every, snapshots) if n) - (stop // both if both else 0)
    is_counted = any(n and stop % n == 0 for n in (every, snapshots))
    return count + (0 if is_counted else 1)
